"""Sampling options through all services, against transformers' logits: alone, together, and preempted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME, completion, output_ids
from support.small_tokenizer import byte_level_tokenizer
from support.tiny_models import TinyModel, prompt_of

EOS_ID = 1
NUM_TOKENS = 24
SMALL_POOL = 20
PROMPTS = [prompt_of(length) for length in (15, 16, 40, 9)]
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"presence_penalty": 2.0, "logit_bias": {"40": 1.5, "41": -100}},
    {"allowed_token_ids": list(range(100, 140)), "frequency_penalty": 0.7},
]


@pytest.fixture(
    params=[
        ("local", "recompute"),
        ("local", "swap"),
        pytest.param(("frames", "auto"), marks=pytest.mark.full),
    ],
    ids=lambda param: f"{param[0]}, {param[1]}",
    scope="module",
)
def cluster(request: pytest.FixtureRequest, tiny_model: PreparedModel) -> Iterator[Cluster]:
    """A pool for two or three of the sequences, or for all."""
    transport, preemption = request.param
    is_small = preemption != "auto"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_SCHEDULER_PREEMPTION", preemption)
        settings = ServerSettings(
            transport, max_num_seqs=16, block_size=8, num_blocks=SMALL_POOL if is_small else 200, num_host_blocks=100
        )
        with running_cluster(tiny_model, settings) as running:
            yield running
            running.assert_idle()
            running.assert_undisturbed()


def expected(tiny: TinyModel, prompt: list[int], options: dict[str, Any]) -> list[int]:
    """Greedy tokens by the written definition of each option."""
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = tiny.logits(prompt + output)[-1].clone()
        if (allowed := options.get("allowed_token_ids")) is not None:
            masked = torch.full_like(logits, -1e9)
            masked[allowed] = logits[allowed]
            logits = masked
        for token_id, bias in options.get("logit_bias", {}).items():
            logits[int(token_id)] += bias
        for token_id in {*prompt, *output}:
            penalty = options.get("repetition_penalty", 1.0)
            logits[token_id] = logits[token_id] / penalty if logits[token_id] > 0 else logits[token_id] * penalty
        for token_id in output:
            logits[token_id] -= options.get("frequency_penalty", 0.0)
        for token_id in set(output):
            logits[token_id] -= options.get("presence_penalty", 0.0)
        output.append(int(logits.argmax()))
    return output


async def test_penalties_and_biases_follow_their_definitions_beside_plain_requests(
    cluster: Cluster, client: openai.AsyncOpenAI, tiny_llama: TinyModel
) -> None:
    pairs = [(prompt, options) for prompt in PROMPTS for options in [*OPTIONS, {}]]
    answers = await asyncio.gather(*(output_ids(client, prompt, NUM_TOKENS, **options) for prompt, options in pairs))
    for (prompt, options), [output] in zip(pairs, answers, strict=True):
        assert output == expected(tiny_llama, prompt, options), options
    plain = [output for (_, options), [output] in zip(pairs, answers, strict=True) if not options]
    ruled = [output for (_, options), [output] in zip(pairs, answers, strict=True) if options == OPTIONS[1]]
    assert plain != ruled
    if cluster.settings.num_blocks == SMALL_POOL:
        assert cluster.metric("octavo_preemptions_total") > 0


async def test_seeded_choices_with_options_repeat_in_any_company(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """Two choices, which differ."""
    options = {"n": 2, "seed": 42, "temperature": 0.8, "frequency_penalty": 0.8, "min_p": 0.02, "typical_p": 0.95}
    alone = await output_ids(client, PROMPTS[2], NUM_TOKENS, **options)
    others = [output_ids(client, prompt, NUM_TOKENS, temperature=1.0) for prompt in PROMPTS]
    together, *_ = await asyncio.gather(output_ids(client, PROMPTS[2], NUM_TOKENS, **options), *others)
    assert together == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("prompt", [PROMPTS[0], prompt_of(110)], ids=["short", "long"])
async def test_text_ends_directly_after_min_tokens_and_not_before(
    cluster: Cluster, client: openai.AsyncOpenAI, prompt: list[int]
) -> None:
    """The end token is the likeliest all along; a second ending token is held off as well."""
    for biased, stop_ids in ((EOS_ID, []), (77, [77, 78])):
        answer = await client.completions.create(
            model=SERVED_NAME,
            prompt=prompt,
            max_tokens=32,
            temperature=0.0,
            logit_bias={str(biased): 100},
            extra_body={"min_tokens": 4, "stop_token_ids": stop_ids, "return_token_ids": True},
        )
        [choice] = answer.choices
        assert (len(choice.token_ids), choice.token_ids[-1], choice.finish_reason) == (5, biased, "stop")  # type: ignore[attr-defined]
        assert not {EOS_ID, *stop_ids} & set(choice.token_ids[:4])  # type: ignore[attr-defined]


async def test_ignored_end_token_is_drawn_on_and_a_stop_token_of_the_request_still_ends(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    [output] = await output_ids(client, PROMPTS[0], 30, logit_bias={str(EOS_ID): 100})
    assert output == [EOS_ID] * 30
    answer = await completion(client, PROMPTS[0], 30, logit_bias={str(EOS_ID): 100}, stop_token_ids=[EOS_ID])
    assert (answer.choices[0].token_ids, answer.choices[0].finish_reason) == ([EOS_ID], "stop")


async def test_bad_word_does_not_come(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """A word that the plain answer has, of one token."""
    tokenizer = byte_level_tokenizer()
    [plain] = await output_ids(client, PROMPTS[0], NUM_TOKENS)
    words = {token_id: tokenizer.decode([token_id]) for token_id in plain}
    banned, word = next(
        (token_id, word) for token_id, word in words.items() if word and tokenizer.encode(word).ids[1:] == [token_id]
    )
    [output] = await output_ids(client, PROMPTS[0], NUM_TOKENS, bad_words=[word])
    assert banned not in output
    assert output[: plain.index(banned)] == plain[: plain.index(banned)]
