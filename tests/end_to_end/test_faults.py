"""Faults that other servers had, tried on the whole system with the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from support.clusters import Cluster, ServerSettings
from support.completions import SERVED_NAME, completion, greedy, output_ids
from support.reference_tokens import Reference, assert_follows
from support.small_tokenizer import byte_level_tokenizer
from support.streams import Stream
from support.tiny_models import prompt_of

NUM_SLOTS, CHUNK, BLOCK_SIZE, NUM_BLOCKS = 4, 32, 8, 100
POOL_TOKENS = BLOCK_SIZE * NUM_BLOCKS  # below the model's length of 1024

SETTINGS = ServerSettings(
    "frames",
    max_num_seqs=NUM_SLOTS,
    max_num_batched_tokens=CHUNK,
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
)

pytestmark = pytest.mark.parametrize("cluster", [SETTINGS], indirect=True, ids=["4 slots, chunk 32, 100 blocks"])


def others_of(length: int, number: int) -> list[int]:
    """Prompts without a common prefix."""
    return [3 + number, *prompt_of(length - 1)]


async def test_fourth_of_four_long_prompts_runs_beside_the_others(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    streams = [Stream() for _ in range(NUM_SLOTS)]
    running = [
        stream.start(client, others_of(80, number), 100, cache_salt="fourth") for number, stream in enumerate(streams)
    ]
    await asyncio.gather(*running)
    first_tokens = [stream.first_token_at for stream in streams]
    ends = [stream.ended_at for stream in streams]
    assert max(at for at in first_tokens if at is not None) < min(at for at in ends if at is not None)


async def test_long_prompt_lets_the_others_go_on(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    decoding, long, short = Stream(), Stream(), Stream()
    decoded = decoding.start(client, [5, 6], 250)
    await decoding.has_tokens(5)
    num_before = len(decoding.token_ids)
    long_task = long.start(client, others_of(500, 7), 5, cache_salt="long")  # 16 steps and more
    short_task = short.start(client, others_of(20, 8), 5, cache_salt="long")
    await long.has_tokens(1)
    assert len(decoding.token_ids) - num_before >= 8, "no decode while the long prompt was computed"
    await asyncio.gather(decoded, long_task, short_task)
    assert short.first_token_at is not None
    assert long.first_token_at is not None
    assert short.first_token_at < long.first_token_at, "the short prompt waited for the long one"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_blocks_are_back_within_a_second_of_the_client_leaving(
    cluster: Cluster, client: openai.AsyncOpenAI, is_stream: bool
) -> None:
    if is_stream:
        stream = Stream()
        running = stream.start(client, [5, 6, 7], 700)
        await stream.has_tokens(5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await completion(client, [5, 6, 7], 700)
    cluster.assert_idle(within_s=1.0)


async def test_normal_ends_cause_no_abort(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    before = cluster.metric("octavo_scheduler_aborted_choices_total")
    await asyncio.gather(*(output_ids(client, [5, number], 3) for number in range(100)))
    assert cluster.metric("octavo_scheduler_aborted_choices_total") == before


async def test_request_larger_than_the_pool_is_refused_and_keeps_nobody_waiting(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    for prompt, num_tokens in ((others_of(POOL_TOKENS + 100, 1), 8), (others_of(POOL_TOKENS - 100, 1), 500)):
        with pytest.raises(openai.BadRequestError) as refused:
            await completion(client, prompt, num_tokens)
        assert refused.value.code == "context_length_exceeded"
        assert str(POOL_TOKENS) in refused.value.message
        assert str(len(prompt) + num_tokens) in refused.value.message or str(len(prompt)) in refused.value.message
    assert len((await output_ids(client, [5, 6], 8))[0]) == 8


async def test_request_that_fills_the_whole_pool_is_served(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    [tokens] = await output_ids(client, others_of(POOL_TOKENS - 40, 2), 40, cache_salt="whole pool")
    assert len(tokens) == 40


async def test_seeded_samples_do_not_depend_on_the_batch_nor_on_preemption(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    sampled: dict[str, Any] = {"seed": 42, "temperature": 0.8}
    alone = await output_ids(client, others_of(100, 3), 60, n=2, cache_salt="a", **sampled)
    assert alone[0] != alone[1]
    for _ in range(2):
        beside, _ = await asyncio.gather(
            output_ids(client, others_of(100, 3), 60, n=2, cache_salt="b", **sampled),
            output_ids(client, others_of(50, 4), 60, temperature=1.0),
        )
        assert beside == alone
    before = cluster.metric("octavo_preemptions_total")
    *_, preempted = await asyncio.gather(
        *(output_ids(client, others_of(150, number), 150, cache_salt="c") for number in range(5, 8)),
        output_ids(client, others_of(100, 3), 60, n=2, cache_salt="d", **sampled),
        output_ids(client, others_of(100, 3), 60, n=2, cache_salt="e", **sampled),
    )
    assert preempted == alone
    assert cluster.metric("octavo_preemptions_total") > before


async def test_sequences_preempted_again_and_again_get_each_token_once(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    prompts = [others_of(120, number) for number in range(8)]
    alone = [(await output_ids(client, prompt, 200, cache_salt="alone"))[0] for prompt in prompts]
    before = cluster.metric("octavo_preemptions_total")
    together = await asyncio.gather(*(output_ids(client, prompt, 200, cache_salt="together") for prompt in prompts))
    assert cluster.metric("octavo_preemptions_total") - before >= 2
    for [tokens], expected in zip(together, alone, strict=True):
        assert len(tokens) == 200
        assert tokens == expected


async def test_more_choices_than_slots_are_all_served(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    tokens = await output_ids(client, others_of(20, 9), 6, n=64, temperature=1.0, seed=1)
    assert len(tokens) == 64
    assert len({tuple(choice) for choice in tokens}) > 32


async def test_forked_choices_under_pressure_give_each_block_back_once(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    answers = await asyncio.gather(
        *(output_ids(client, others_of(150, number), 64, n=4, temperature=1.0) for number in range(4))
    )
    assert [len(choices) for choices in answers] == [4, 4, 4, 4]
    cluster.assert_idle()


async def test_choices_of_a_list_of_prompts_belong_to_their_prompts(
    cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    for first in range(0, 9, 3):
        asked = references[first : first + 3]
        choices = await output_ids(client, [reference.prompt_ids for reference in asked], 10, n=2)
        for number, reference in enumerate(asked):
            for tokens in choices[2 * number : 2 * number + 2]:
                assert tokens == reference.output_ids[:10]


async def test_bad_requests_do_not_touch_a_good_one(
    cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    reference = references[9]
    good = asyncio.create_task(assert_follows(reference, greedy(client)))
    bad: list[tuple[dict[str, Any], str]] = [
        ({"prompt": [5, 512]}, "prompt[1]"),
        ({"prompt": [5, -1]}, "prompt[1]"),
        ({"prompt": "x", "stop_token_ids": [512]}, "stop_token_ids[0]"),
        ({"prompt": "x", "stop_token_ids": [512], "min_tokens": 1}, "stop_token_ids[0]"),
        ({"prompt": "x", "logit_bias": {"512": 1}}, "logit_bias.512"),
        ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "n": 10**6}, "n"),
        ({"prompt": "x", "logprobs": 10**6}, "logprobs"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
    ]
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as http:
        for body, field in bad * 3:
            answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    await good


@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 1.0, "seed": 7}, {"logprobs": 3}])
async def test_stream_says_what_the_whole_answer_says(
    cluster: Cluster, client: openai.AsyncOpenAI, options: dict[str, Any]
) -> None:
    request: dict[str, Any] = {"model": SERVED_NAME, "prompt": "Count: 1 2 3", "max_tokens": 50, "temperature": 0}
    request |= {**options, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    whole: Any = await client.completions.create(**request)
    chunks = await client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    num_choices = len(whole.choices)
    texts, ids = [""] * num_choices, [list[int]() for _ in range(num_choices)]
    logprobs: list[float] = []
    ends: list[tuple[int, str]] = []
    usage = None
    async for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids or []
            logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
            if choice.finish_reason:
                ends.append((choice.index, choice.finish_reason))
    assert texts == [choice.text for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    assert sorted(ends) == [(choice.index, choice.finish_reason) for choice in whole.choices]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 50 * num_choices)
    if "logprobs" in options:
        assert logprobs == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-4)


async def test_text_is_that_of_all_tokens_decoded_at_once(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    tokenizer: Tokenizer = byte_level_tokenizer()
    for seed in range(10):
        stream = Stream()
        await stream.run(client, others_of(10, seed), 60, temperature=1.0, seed=seed)
        known = [token for token in stream.token_ids if token < tokenizer.get_vocab_size()]
        assert stream.text == tokenizer.decode(known, skip_special_tokens=True)
        assert stream.finish_reasons == ["length"]


async def test_stop_token_ends_a_choice_at_its_first_place(
    cluster: Cluster, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    reference = references[8]
    stop_id = reference.output_ids[12]
    place = reference.output_ids.index(stop_id)
    answer: Any = await client.completions.create(
        model=SERVED_NAME,
        prompt=reference.prompt_ids,
        max_tokens=40,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, "stop_token_ids": [stop_id]},
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop_id
    assert choice.token_ids == reference.output_ids[: place + 1]
