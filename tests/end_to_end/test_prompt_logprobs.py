"""Log-probabilities of every prompt token, in chunks, cached or preempted, against transformers'."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME, output_ids
from support.tiny_models import TinyModel, prompt_of


@pytest.fixture(scope="module", params=["local", pytest.param("frames", marks=pytest.mark.full)])
def cluster(request: pytest.FixtureRequest, tiny_model: PreparedModel) -> Iterator[Cluster]:
    """Prompts are computed in chunks of at most 24 tokens, in a pool for three of the longest."""
    settings = ServerSettings(
        request.param, max_num_seqs=8, max_num_batched_tokens=24, block_size=16, num_blocks=24, num_host_blocks=32
    )
    with running_cluster(tiny_model, settings) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


def expected(tiny: TinyModel, prompt: list[int]) -> torch.Tensor:
    """[len(prompt) - 1, vocab_size]: what each token but the first is drawn from."""
    return tiny.logits(prompt).log_softmax(-1)[:-1]


async def ask(client: openai.AsyncOpenAI, prompt: list[int], **options: Any) -> Any:
    known = {name: options.pop(name) for name in ("echo", "logprobs", "n") if name in options}
    num_tokens = options.pop("max_tokens", 1)
    return await client.completions.create(
        model=SERVED_NAME, prompt=prompt, max_tokens=num_tokens, temperature=0.0, extra_body=options, **known
    )


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 48, 100])
async def test_echo_lists_every_prompt_token_whatever_is_cached(
    cluster: Cluster, client: openai.AsyncOpenAI, tiny_llama: TinyModel, length: int
) -> None:
    """pfx-a90, and K05 at the borders of blocks and chunks."""
    prompt = prompt_of(length)
    wanted = expected(tiny_llama, prompt)
    await output_ids(client, prompt, 4)
    for max_tokens in (1, 0):
        answer = await ask(client, prompt, echo=True, logprobs=1, max_tokens=max_tokens)
        listed = answer.choices[0].logprobs
        assert len(listed.tokens) == length + max_tokens
        assert (listed.token_logprobs[0], listed.top_logprobs[0]) == (None, None)
        values = torch.tensor(listed.token_logprobs[1:length])
        assert torch.allclose(
            values, wanted[torch.arange(length - 1), torch.tensor(prompt[1:], dtype=torch.long)], atol=1e-4
        )
        best = [max(top.values()) for top in listed.top_logprobs[1:length]]
        assert best == pytest.approx(wanted.max(-1).values.tolist(), abs=1e-4)
        assert answer.usage.prompt_tokens == length
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        assert answer.usage.completion_tokens == max_tokens


async def test_scoring_without_a_length_generates_the_default(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    for given in ({}, {"max_tokens": None}):
        answer: Any = await client.completions.create(
            model=SERVED_NAME,
            prompt=prompt_of(20),
            temperature=0.0,
            echo=True,
            logprobs=1,
            extra_body={"ignore_eos": True, **given},
        )
        [choice] = answer.choices
        assert (answer.usage.completion_tokens, choice.finish_reason) == (16, "length")
        assert choice.logprobs.token_logprobs[0] is None
        assert len(choice.logprobs.token_logprobs) == 36


async def test_prompt_log_probabilities_have_ranks_and_stand_beside_each_choice(
    cluster: Cluster, client: openai.AsyncOpenAI, tiny_llama: TinyModel
) -> None:
    prompt = prompt_of(40)
    wanted = expected(tiny_llama, prompt)
    answer = await ask(client, prompt, prompt_logprobs=2, n=2, max_tokens=3)
    assert len(answer.choices) == 2
    for choice in answer.choices:
        first, *rest = choice.prompt_logprobs
        assert first is None
        assert len(rest) == 39
        for row, token_id, entries in zip(wanted, prompt[1:], rest, strict=True):
            best = row.topk(2)
            assert set(entries) == {*map(str, best.indices.tolist()), str(token_id)}
            assert entries[str(token_id)]["logprob"] == pytest.approx(row[token_id].item(), abs=1e-4)
            assert entries[str(token_id)]["rank"] == int((row > row[token_id]).sum()) + 1
            assert entries[str(best.indices[0].item())]["rank"] == 1


async def test_prompts_that_are_preempted_are_told_of_once(
    cluster: Cluster, client: openai.AsyncOpenAI, tiny_llama: TinyModel
) -> None:
    prompts = [prompt_of(length) for length in (90, 95, 100, 105)]
    answers, *_ = await asyncio.gather(
        asyncio.gather(*(ask(client, prompt, prompt_logprobs=0, max_tokens=40, ignore_eos=True) for prompt in prompts)),
        *(output_ids(client, prompt_of(60 + index), 60) for index in range(4)),
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        [choice] = answer.choices
        values = [
            entries[str(token)]["logprob"]
            for token, entries in zip(prompt[1:], choice.prompt_logprobs[1:], strict=True)
        ]
        wanted = expected(tiny_llama, prompt)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        assert values == pytest.approx(wanted.tolist(), abs=1e-4)
    assert cluster.metric("octavo_preemptions_total") > 0


async def test_chat_tells_of_its_prompt(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    answer: Any = await client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": "fox"}],
        max_tokens=2,
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    for token_id, entries in zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True):
        assert set(entries) == {str(token_id)}
