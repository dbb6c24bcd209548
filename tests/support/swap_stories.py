"""What a pool for two of the sequences, with host memory for the rest, must do; on any device."""

from __future__ import annotations

import asyncio

import httpx

from support.clusters import Cluster
from support.plain_http import cached_tokens_of, greedy
from support.reference_tokens import Reference, assert_follows

SMALL_POOL = 48
"""Blocks of 8: the longest prompt with its output needs 24, all together 120."""
NUM_HOST_BLOCKS = 200


async def swap_whole_and_in_part(cluster: Cluster, client: httpx.AsyncClient, references: list[Reference]) -> None:
    """All prompts at once, twice: whoever has to give way goes on with the same tokens."""
    for salt in ("first", "second"):
        await asyncio.gather(*(assert_follows(reference, greedy(client, cache_salt=salt)) for reference in references))
    assert cluster.metric("octavo_preemptions_total", kind="swap") > 0
    assert cluster.metric("octavo_preemptions_total", kind="partial_swap") > 0
    assert cluster.metric("octavo_transferred_blocks_total", direction="to_host") > 0
    assert cluster.metric("octavo_transferred_blocks_total", direction="to_device") > 0


async def restore_an_evicted_prefix(cluster: Cluster, client: httpx.AsyncClient, references: list[Reference]) -> None:
    """A prefix that others have pushed out comes back from host memory."""
    longest = max(references, key=lambda reference: len(reference.prompt_ids))
    for salt in ("mine", "other", "another", "a third one"):
        await assert_follows(longest, greedy(client, cache_salt=salt))
    assert await cached_tokens_of(client, longest.prompt_ids, cache_salt="mine") > 0
    await assert_follows(longest, greedy(client, cache_salt="mine"))
    assert cluster.metric("octavo_scheduler_host_prompt_tokens_total") > 0
