"""SmolLM2 gives transformers' greedy tokens while its blocks are swapped, restored from the host, forked, branched."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, Transport, running_cluster
from support.completions import SERVED_NAME, completion, greedy
from support.reference_tokens import FORGIVEN_MARGIN, Reference, assert_follows

BLOCK_SIZE = 8
SMALL_POOL = 22
"""Blocks. Four sequences of `chat_short` begin with 20 and end with 32: one gives way in part, another as a whole."""

LARGE_POOL = 64
"""Room for a kept response and its branches."""

NUM_TOKENS = 24
"""Crosses three borders of blocks."""

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]


def settings(transport: Transport, pipeline_depth: int, num_blocks: int) -> ServerSettings:
    return ServerSettings(
        transport,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        num_host_blocks=200,
        pipeline_depth=pipeline_depth,
    )


SWAPPING = settings("frames", 2, SMALL_POOL)
RESTORING = settings("grpc", 1, SMALL_POOL)
BRANCHING = settings("local", 2, LARGE_POOL)


def whole_matrix(usual: ServerSettings) -> list[object]:
    """The usual settings, and for the long run the others with such a pool."""
    assert usual.num_blocks is not None
    every = itertools.product(("frames", "grpc", "local"), (2, 1))
    others = [settings(transport, depth, usual.num_blocks) for transport, depth in every]
    return [usual, *(pytest.param(other, marks=pytest.mark.full) for other in others if other != usual)]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, real_model: PreparedModel) -> Iterator[Cluster]:
    """The real model in a small pool, which swaps whoever has to give way."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OCTAVO_SCHEDULER_PREEMPTION", "swap")
        with running_cluster(real_model, request.param) as running:
            yield running
            running.assert_idle()
            running.assert_undisturbed()


@pytest.fixture(scope="module")
def clear(real_references: list[Reference]) -> dict[str, Reference]:
    """References whose first tokens no rounding can change, by name."""
    return {
        reference.name: reference
        for reference in real_references
        if min(reference.margins[:NUM_TOKENS]) > FORGIVEN_MARGIN
    }


async def branch(
    client: openai.AsyncOpenAI, parent_id: str, num_shared: int, suffix: list[int], num_tokens: int, salt: str
) -> tuple[list[int], int]:
    """Output ids of a branch, and the prompt tokens that it did not compute."""
    options = {"branch": {"id": parent_id, "num_tokens": num_shared}, "cache_salt": salt}
    answer = await completion(client, suffix or openai.omit, num_tokens, **options)
    return answer.choices[0].token_ids, answer.usage.prompt_tokens_details.cached_tokens


async def kept(client: openai.AsyncOpenAI, reference: Reference, salt: str) -> Any:
    """A response of `NUM_TOKENS` tokens that is there to be branched from."""
    answer = await completion(client, reference.prompt_ids, NUM_TOKENS, keep=60, cache_salt=salt)
    assert answer.choices[0].token_ids == reference.output_ids[:NUM_TOKENS]
    return answer


async def give_up(client: openai.AsyncOpenAI, response_id: str, salt: str) -> None:
    await client.delete(f"/completions/{response_id}", cast_to=object, options={"params": {"cache_salt": salt}})


@pytest.mark.parametrize("cluster", whole_matrix(SWAPPING), indirect=True)
async def test_swapped_whole_and_in_part(
    cluster: Cluster, client: openai.AsyncOpenAI, clear: dict[str, Reference]
) -> None:
    salts = ("first", "second", "third", "fourth")
    crowd = (assert_follows(clear["chat_short"], greedy(client, cache_salt=salt), NUM_TOKENS) for salt in salts)
    await asyncio.gather(*crowd)
    assert cluster.metric("octavo_preemptions_total", kind="swap") > 0
    assert cluster.metric("octavo_preemptions_total", kind="partial_swap") > 0
    assert cluster.metric("octavo_transferred_blocks_total", direction="to_host") > 0
    assert cluster.metric("octavo_transferred_blocks_total", direction="to_device") > 0


@pytest.mark.parametrize("cluster", whole_matrix(RESTORING), indirect=True)
async def test_restored_from_the_host_after_eviction(
    cluster: Cluster, client: openai.AsyncOpenAI, clear: dict[str, Reference]
) -> None:
    reference = clear["chat_multiturn"]
    for salt in ("mine", "other", "another", "a third one"):
        await assert_follows(reference, greedy(client, cache_salt=salt), num_tokens=4)
    restored = cluster.metric("octavo_prefix_blocks_total", outcome="hit_host")
    await assert_follows(reference, greedy(client, cache_salt="mine"), NUM_TOKENS)
    assert cluster.metric("octavo_prefix_blocks_total", outcome="hit_host") > restored
    assert cluster.metric("octavo_scheduler_host_prompt_tokens_total") > 0
    assert cluster.metric("octavo_transferred_blocks_total", direction="to_device") > 0


@pytest.mark.parametrize("cluster", whole_matrix(BRANCHING), indirect=True)
async def test_forked_at_any_position_of_a_kept_response(
    cluster: Cluster, client: openai.AsyncOpenAI, clear: dict[str, Reference]
) -> None:
    reference = clear["raw_code"]
    parent = await kept(client, reference, "forks")
    tokens = reference.prompt_ids + reference.output_ids[:NUM_TOKENS]
    num_prompt, forks = len(reference.prompt_ids), cluster.metric("octavo_forks_total")
    for num_shared in (
        5,
        num_prompt,
        24,
        25,
        37,
    ):  # in the prompt, at its end, at a border of blocks, behind one, in a tail
        suffix = tokens[num_shared:num_prompt]
        start = max(0, num_shared - num_prompt)
        output, num_cached = await branch(client, parent.id, num_shared, suffix, NUM_TOKENS - start, "forks")
        assert output == reference.output_ids[start:NUM_TOKENS]
        assert num_cached == num_shared - (not suffix)  # one is left to compute logits from
    assert cluster.metric("octavo_forks_total") == forks + 5
    await give_up(client, parent.id, "forks")


@pytest.mark.parametrize("cluster", whole_matrix(BRANCHING), indirect=True)
async def test_branches_say_something_else_than_their_parent(
    cluster: Cluster, client: openai.AsyncOpenAI, clear: dict[str, Reference]
) -> None:
    first, second = clear["prefix_a"], clear["prefix_b"]
    pairs = zip(first.prompt_ids, second.prompt_ids, strict=True)
    num_common = next(place for place, (one, other) in enumerate(pairs) if one != other)
    assert num_common % BLOCK_SIZE
    forks = cluster.metric("octavo_forks_total")
    parent = await kept(client, first, "branches")
    suffix = second.prompt_ids[num_common:]
    branches = [branch(client, parent.id, num_common, suffix, NUM_TOKENS, "branches") for _ in range(2)]
    whole = branch(client, parent.id, len(first.prompt_ids) + 8, [], NUM_TOKENS - 8, "branches")
    *others, (output, _) = await asyncio.gather(*branches, whole)
    assert others == [(second.output_ids[:NUM_TOKENS], num_common)] * 2
    assert output == first.output_ids[8:NUM_TOKENS]
    assert cluster.metric("octavo_forks_total") == forks + 3
    await give_up(client, parent.id, "branches")


@pytest.mark.parametrize("cluster", whole_matrix(BRANCHING), indirect=True)
async def test_branched_from_while_it_runs(
    cluster: Cluster, client: openai.AsyncOpenAI, clear: dict[str, Reference]
) -> None:
    reference = clear["chat_unicode"]
    num_prompt, forks = len(reference.prompt_ids), cluster.metric("octavo_forks_total")
    parent = await client.completions.create(
        model=SERVED_NAME,
        prompt=reference.prompt_ids,
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": "live"},
    )
    tokens: list[int] = []
    branched: asyncio.Task[tuple[list[int], int]] | None = None
    async for chunk in parent:
        tokens += chunk.choices[0].token_ids if chunk.choices else []
        if branched is None and len(tokens) >= 3:
            coroutine = branch(client, chunk.id, num_prompt + 3, [], NUM_TOKENS - 3, "live")
            branched = asyncio.create_task(coroutine)
    assert branched is not None
    output, num_cached = await branched
    assert tokens == reference.output_ids[:NUM_TOKENS]
    assert output == reference.output_ids[3:NUM_TOKENS]
    assert num_cached == num_prompt + 2
    assert cluster.metric("octavo_forks_total") == forks + 1
