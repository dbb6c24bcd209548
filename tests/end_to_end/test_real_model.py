"""SmolLM2 gives transformers' greedy tokens for each of 14 prompts, whatever is switched on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import openai
import pytest
from tokenizers import Tokenizer

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, Transport, running_cluster
from support.completions import SERVED_NAME, cached_tokens_of, greedy
from support.reference_tokens import Reference, assert_follows

SMALL_POOL = 76
"""Blocks of 16: the longest prompt with its output needs 50, all together 143."""

MATRIX_TOKENS = 24
"""Of each continuation's 64, in the matrix: enough to cross a border of blocks."""
MATRIX_POOL = 54
"""Small enough that sequences are preempted, whatever the chunk."""

USUAL = ServerSettings("frames", max_num_seqs=42, max_num_batched_tokens=512, max_model_len=1024)
SMALL_CHUNKS = ServerSettings(
    "grpc", max_num_seqs=16, max_num_batched_tokens=16, max_model_len=1024, prefix_cache=False
)
FEW_BLOCKS = ServerSettings(
    "local", max_num_seqs=16, max_num_batched_tokens=512, num_blocks=SMALL_POOL, pipeline_depth=1
)


def whole_matrix() -> list[object]:
    transports: list[Transport] = ["frames", "grpc", "local"]
    return [
        pytest.param(
            ServerSettings(
                transport,
                max_num_seqs=42 if chunk is None else 16,
                max_num_batched_tokens=chunk,
                num_blocks=num_blocks,
                max_model_len=1024,
                pipeline_depth=depth,
                prefix_cache=cache,
            ),
            marks=pytest.mark.full,
        )
        for transport, chunk, num_blocks, depth, cache in itertools.product(
            transports, [None, 16], [None, MATRIX_POOL], [2, 1], [True, False]
        )
    ]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, real_model: PreparedModel) -> Iterator[Cluster]:
    """The real model, served as the parameter says."""
    with running_cluster(real_model, request.param) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]


async def together(
    client: openai.AsyncOpenAI, references: list[Reference], num_tokens: int | None = None, **options: object
) -> None:
    continuation = greedy(client, **options)
    await asyncio.gather(*(assert_follows(reference, continuation, num_tokens=num_tokens) for reference in references))


@pytest.mark.parametrize("cluster", [USUAL], indirect=True)
async def test_all_prompts_at_once_with_a_cold_and_a_hot_cache(
    cluster: Cluster, client: openai.AsyncOpenAI, real_references: list[Reference]
) -> None:
    await together(client, real_references)
    for reference in real_references:
        num_full = (len(reference.prompt_ids) - 1) // 16
        assert await cached_tokens_of(client, reference.prompt_ids) == 16 * num_full
    await together(client, real_references)


@pytest.mark.parametrize("cluster", [USUAL], indirect=True)
async def test_each_prompt_alone(
    cluster: Cluster, client: openai.AsyncOpenAI, real_references: list[Reference]
) -> None:
    for reference in real_references:
        await assert_follows(reference, greedy(client), num_tokens=12)


@pytest.mark.parametrize("cluster", [USUAL], indirect=True)
async def test_three_choices_are_each_the_same_as_one(
    cluster: Cluster, client: openai.AsyncOpenAI, real_references: list[Reference]
) -> None:
    await together(client, real_references[:6], n=3, cache_salt="three")


@pytest.mark.parametrize("cluster", [USUAL], indirect=True)
async def test_chat_says_what_the_model_says(
    cluster: Cluster, client: openai.AsyncOpenAI, real_model: PreparedModel, real_references: list[Reference]
) -> None:
    tokenizer = Tokenizer.from_file(str(real_model.folder / "tokenizer.json"))
    for reference in real_references:
        if reference.messages is None or reference.eos_at is None:
            continue
        answer = await client.chat.completions.create(
            model=SERVED_NAME,
            messages=reference.messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=64,
        )
        assert answer.choices[0].message.content == tokenizer.decode(reference.output_ids[: reference.eos_at])
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(reference.prompt_ids)


@pytest.mark.parametrize("cluster", [SMALL_CHUNKS], indirect=True)
async def test_small_chunks_without_a_cache(
    cluster: Cluster, client: openai.AsyncOpenAI, real_references: list[Reference]
) -> None:
    await together(client, real_references)
    assert await cached_tokens_of(client, real_references[0].prompt_ids) == 0


@pytest.mark.parametrize("cluster", [FEW_BLOCKS], indirect=True)
async def test_preempted_sequences_in_one_process(
    cluster: Cluster, client: openai.AsyncOpenAI, real_references: list[Reference]
) -> None:
    await together(client, real_references)
    assert cluster.metric("octavo_preemptions_total") > 0


@pytest.mark.parametrize("cluster", whole_matrix(), indirect=True)
async def test_every_combination(
    cluster: Cluster, client: openai.AsyncOpenAI, real_references: list[Reference]
) -> None:
    for reference in real_references:
        await assert_follows(reference, greedy(client, cache_salt="alone"), num_tokens=8)
    await together(client, real_references, MATRIX_TOKENS)
    await together(client, real_references, MATRIX_TOKENS)
    tight = cluster.settings.num_blocks is not None
    # Small chunks let sequences in so slowly that 24 tokens end before blocks are short.
    await together(client, real_references, None if tight else MATRIX_TOKENS, n=3, cache_salt="three")
    assert not tight or cluster.metric("octavo_preemptions_total") > 0
