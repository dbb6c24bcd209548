"""SmolLM2 in bfloat16 through four processes on a GPU: graphs, shared prefixes, swap, two steps on their way.

Its tokens equal the reference's wherever that has a margin of at least 0.3. Runs where OCTAVO_TEST_MODEL names the
model's folder: `octavo model path` prints it on a machine that has the model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.plain_http import SERVED_NAME, cached_tokens_of, client_of, greedy
from support.reference_tokens import FORGIVEN_MARGIN_BF16, Reference, assert_follows, smollm2_references

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real_model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif("OCTAVO_TEST_MODEL" not in os.environ, reason="OCTAVO_TEST_MODEL names no folder"),
]

SMALL_POOL = 76
"""Blocks of 16: the longest prompt with its output needs 50, all together 143."""
NUM_COPIES = 8
"""Of each prompt at once: they share its blocks, enough for attention to read them once."""

ROOMY = ServerSettings("frames", max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=1024)
TIGHT = ServerSettings(
    "frames", max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024, num_blocks=SMALL_POOL,
    num_host_blocks=300,
)  # fmt: skip


@pytest.fixture(scope="module", params=[ROOMY, TIGHT], ids=["roomy", "tight"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_WORKER_DEVICE", "cuda")
        patch.setenv("OCTAVO_WORKER_DTYPE", "bfloat16")
        patch.setenv("OCTAVO_SCHEDULER_PREEMPTION", "swap")
        model = PreparedModel(Path(os.environ["OCTAVO_TEST_MODEL"]), SERVED_NAME)
        with running_cluster(model, request.param) as running:
            yield running
            running.assert_idle()
            running.assert_undisturbed()


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(cluster) as opened:
        yield opened


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    return smollm2_references()


async def together(client: httpx.AsyncClient, references: list[Reference], **options: object) -> None:
    following = (
        assert_follows(reference, greedy(client, **options), forgiven_margin=FORGIVEN_MARGIN_BF16)
        for reference in references
    )
    await asyncio.gather(*following)


async def test_all_prompts_at_once_and_again_from_the_cache(
    cluster: Cluster, client: httpx.AsyncClient, references: list[Reference]
) -> None:
    await together(client, references)
    await together(client, references)
    if cluster.settings is TIGHT:
        assert cluster.metric("octavo_preemptions_total", kind="swap") > 0
        assert cluster.metric("octavo_transferred_blocks_total", direction="to_device") > 0
    else:
        longest = max(references, key=lambda reference: len(reference.prompt_ids))
        assert await cached_tokens_of(client, longest.prompt_ids) > 700


async def test_many_copies_of_a_prompt_share_its_blocks(
    cluster: Cluster, client: httpx.AsyncClient, references: list[Reference]
) -> None:
    copies = 2 if cluster.settings is TIGHT else NUM_COPIES
    await together(client, references * copies)


async def test_choices_of_one_prompt_follow_it_together(client: httpx.AsyncClient, references: list[Reference]) -> None:
    await together(client, references, n=3)
