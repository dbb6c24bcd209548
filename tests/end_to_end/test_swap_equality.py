"""Greedy tokens equal those of transformers while sequences are swapped, whole and in part, and prefixes restored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import pytest_asyncio

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.plain_http import client_of
from support.reference_tokens import Reference
from support.swap_stories import NUM_HOST_BLOCKS, SMALL_POOL, restore_an_evicted_prefix, swap_whole_and_in_part


@pytest.fixture(
    params=[
        ServerSettings(transport=transport, pipeline_depth=depth, prefix_cache=prefix_cache)  # type: ignore[arg-type]
        for transport, depth, prefix_cache in [
            ("local", 2, True),
            ("local", 1, False),
            ("frames", 2, True),
            ("grpc", 1, True),
        ]
    ],
    ids=lambda settings: f"{settings.transport}, depth {settings.pipeline_depth}",
)
def cluster(
    request: pytest.FixtureRequest, tiny_model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    monkeypatch.setenv("OCTAVO_SCHEDULER_PREEMPTION", "swap")
    monkeypatch.setenv("OCTAVO_KVMANAGER_CHECK_LEDGER", "true")
    settings = ServerSettings(
        transport=request.param.transport,
        max_num_seqs=16,
        block_size=8,
        num_blocks=SMALL_POOL,
        num_host_blocks=NUM_HOST_BLOCKS,
        pipeline_depth=request.param.pipeline_depth,
        prefix_cache=request.param.prefix_cache,
    )
    with running_cluster(tiny_model, settings) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


@pytest_asyncio.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(cluster) as opened:
        yield opened


async def test_all_prompts_at_once_in_a_pool_for_two_of_them(
    cluster: Cluster, http: httpx.AsyncClient, references: list[Reference]
) -> None:
    await swap_whole_and_in_part(cluster, http, references)


async def test_a_prefix_that_was_evicted_comes_back_from_the_host(
    cluster: Cluster, http: httpx.AsyncClient, references: list[Reference]
) -> None:
    if not cluster.settings.prefix_cache:
        pytest.skip("nothing is kept without a prefix cache")
    await restore_an_evicted_prefix(cluster, http, references)
