"""Greedy tokens equal those of transformers while sequences are swapped, whole and in part, and prefixes restored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import cached_tokens_of, greedy
from support.reference_tokens import Reference, assert_follows

BLOCK_SIZE = 8
SMALL_POOL = 48
"""Blocks: the longest prompt with its output needs 24, all together 120."""


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
        block_size=BLOCK_SIZE,
        num_blocks=SMALL_POOL,
        num_host_blocks=200,
        pipeline_depth=request.param.pipeline_depth,
        prefix_cache=request.param.prefix_cache,
    )
    with running_cluster(tiny_model, settings) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


async def test_all_prompts_at_once_in_a_pool_for_two_of_them(
    cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    for salt in ("first", "second"):
        await asyncio.gather(*(assert_follows(reference, greedy(client, cache_salt=salt)) for reference in references))
    assert cluster.metric("octavo_preemptions_total", kind="swap") > 0
    assert cluster.metric("octavo_preemptions_total", kind="partial_swap") > 0
    assert cluster.metric("octavo_transferred_blocks_total", direction="to_device") > 0


async def test_a_prefix_that_was_evicted_comes_back_from_the_host(
    cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    if not cluster.settings.prefix_cache:
        pytest.skip("nothing is kept without a prefix cache")
    longest = max(references, key=lambda reference: len(reference.prompt_ids))
    for salt in ("mine", "other", "another", "a third one"):
        await assert_follows(longest, greedy(client, cache_salt=salt))
    assert await cached_tokens_of(client, longest.prompt_ids, cache_salt="mine") > 0
    await assert_follows(longest, greedy(client, cache_salt="mine"))
    assert cluster.metric("octavo_scheduler_host_prompt_tokens_total") > 0
