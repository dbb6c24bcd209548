"""The whole system with a GPU worker: a small random Llama in float32, its tokens equal to those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio
import torch

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.plain_http import SERVED_NAME, client_of, greedy, leave_after
from support.reference_tokens import Reference, assert_follows, tiny_references
from support.served_llama import save_served_llama
from support.swap_stories import NUM_HOST_BLOCKS, SMALL_POOL, restore_an_evicted_prefix, swap_whole_and_in_part
from support.tiny_models import TinyModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return save_served_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="module")
def references(tiny_llama: TinyModel) -> list[Reference]:
    return tiny_references(tiny_llama, num_tokens=40)


@pytest.fixture(
    scope="module",
    params=[
        ServerSettings("local", pipeline_depth=2),
        ServerSettings("frames", pipeline_depth=2),
        ServerSettings("frames", pipeline_depth=1, prefix_cache=False),
    ],
    ids=lambda settings: f"{settings.transport}, depth {settings.pipeline_depth}, cache {settings.prefix_cache}",
)
def cluster(request: pytest.FixtureRequest, tiny_llama: TinyModel) -> Iterator[Cluster]:
    """A pool for two of the sequences, and host memory for the rest."""
    settings = ServerSettings(
        transport=request.param.transport,
        max_num_seqs=16,
        block_size=8,
        num_blocks=SMALL_POOL,
        num_host_blocks=NUM_HOST_BLOCKS,
        pipeline_depth=request.param.pipeline_depth,
        prefix_cache=request.param.prefix_cache,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_SCHEDULER_PREEMPTION", "swap")
        patch.setenv("OCTAVO_KVMANAGER_CHECK_LEDGER", "true")
        patch.setenv("OCTAVO_WORKER_DEVICE", "cuda")
        patch.setenv("OCTAVO_WORKER_DTYPE", "float32")
        with running_cluster(PreparedModel(tiny_llama.folder, SERVED_NAME), settings) as running:
            yield running
            running.assert_idle()
            running.assert_undisturbed()


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(cluster) as opened:
        yield opened


async def test_sequences_that_are_swapped_whole_and_in_part_go_on_with_the_same_tokens(
    cluster: Cluster, client: httpx.AsyncClient, references: list[Reference]
) -> None:
    await swap_whole_and_in_part(cluster, client, references)


async def test_an_evicted_prefix_comes_back_from_the_host(
    cluster: Cluster, client: httpx.AsyncClient, references: list[Reference]
) -> None:
    if not cluster.settings.prefix_cache:
        pytest.skip("nothing is kept without a prefix cache")
    await restore_an_evicted_prefix(cluster, client, references)


async def test_clients_that_leave_while_sequences_are_swapped_disturb_nobody(
    cluster: Cluster, client: httpx.AsyncClient, references: list[Reference]
) -> None:
    """Answers that the pool cannot hold at once, beside clients that leave after 1 to 30 tokens, swapped or not."""
    before = cluster.metric("octavo_transferred_blocks_total", direction="to_host")
    staying = [assert_follows(reference, greedy(client, cache_salt="stayed")) for reference in references]
    leaving = [
        leave_after(client, reference.prompt_ids, 1 + 3 * (index % 10), cache_salt="left")
        for index, reference in enumerate(references)
    ]
    await asyncio.gather(*staying, *leaving)
    assert cluster.metric("octavo_transferred_blocks_total", direction="to_host") > before
    cluster.assert_idle(within_s=10.0)


async def test_choices_of_one_prompt_copy_the_block_they_write_to(
    client: httpx.AsyncClient, references: list[Reference]
) -> None:
    await asyncio.gather(*(assert_follows(reference, greedy(client, n=3)) for reference in references[:6]))
