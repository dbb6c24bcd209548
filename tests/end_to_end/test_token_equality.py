"""Greedy tokens of the whole system equal those of transformers, whatever the settings, whoever shares the batch."""

from __future__ import annotations

import asyncio
import itertools

import openai
import pytest

from support.clusters import Cluster, ServerSettings, Transport
from support.completions import cached_tokens_of, greedy
from support.reference_tokens import Reference, assert_follows

BLOCK_SIZE = 8
SMALL_POOL = 60
"""Blocks: the longest prompt with its output needs 24, all together 120."""


def settings_matrix() -> list[object]:
    """Every combination in one process; over each carrier, in the usual run, those that pair up all settings."""
    found: list[object] = []
    features = itertools.product([2, 1], [True, False], [None, 16], [None, SMALL_POOL])
    for depth, prefix_cache, chunk, num_blocks in features:
        num_unusual = sum((depth == 1, not prefix_cache, chunk is not None, num_blocks is not None))
        transports: list[Transport] = ["local", "frames", "grpc"]
        for transport in transports:
            settings = ServerSettings(
                transport=transport,
                max_num_seqs=16,
                max_num_batched_tokens=chunk,
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                pipeline_depth=depth,
                prefix_cache=prefix_cache,
            )
            is_usual = (
                transport == "local"
                or (transport == "frames" and num_unusual == (3 if num_blocks and prefix_cache else 0))
                or (transport == "grpc" and num_unusual == 4)
            )
            found.append(
                pytest.param(settings, id=_name(settings), marks=() if is_usual else (pytest.mark.full,)),
            )
    return found


def _name(settings: ServerSettings) -> str:
    parts = [settings.transport, f"depth {settings.pipeline_depth}"]
    parts += [] if settings.prefix_cache else ["no cache"]
    parts += [f"chunk {settings.max_num_batched_tokens}"] if settings.max_num_batched_tokens else []
    parts += [f"{settings.num_blocks} blocks"] if settings.num_blocks else []
    return ", ".join(parts)


pytestmark = pytest.mark.parametrize("cluster", settings_matrix(), indirect=True)


async def test_each_prompt_alone(cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]) -> None:
    for reference in references:
        await assert_follows(reference, greedy(client, cache_salt="alone"), num_tokens=12)


async def test_all_prompts_at_once_with_a_cold_and_a_hot_cache(
    cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    for _ in range(2):
        await asyncio.gather(
            *(assert_follows(reference, greedy(client, cache_salt="together")) for reference in references)
        )
    if cluster.settings.num_blocks == SMALL_POOL:
        assert cluster.metric("octavo_preemptions_total") > 0


async def test_prompt_wholly_in_cache_leaves_its_last_block_to_compute(
    cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    for reference in references:
        prompt, num_full = reference.prompt_ids, (len(reference.prompt_ids) - 1) // BLOCK_SIZE
        salt = f"twice {reference.name} {len(prompt)}"
        assert await cached_tokens_of(client, prompt, cache_salt=salt) == 0
        assert (
            await cached_tokens_of(client, prompt, cache_salt=salt)
            == num_full * BLOCK_SIZE * cluster.settings.prefix_cache
        )


async def test_three_choices_are_each_the_same_as_one(
    cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    await asyncio.gather(
        *(assert_follows(reference, greedy(client, n=3, cache_salt="three")) for reference in references)
    )
