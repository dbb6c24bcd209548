"""Completions by token ids, over the official client."""

from __future__ import annotations

from typing import Any

import openai

from support.reference_tokens import Continue

SERVED_NAME = "served"
"""What the tests call the model that they serve."""


async def completion(client: openai.AsyncOpenAI, prompt: Any, num_tokens: int, **options: Any) -> Any:
    """Exactly `num_tokens` tokens for each choice, greedy unless the options say otherwise."""
    known = {name: options.pop(name) for name in ("n", "seed", "temperature", "logprobs") if name in options}
    return await client.completions.create(
        model=SERVED_NAME,
        prompt=prompt,
        max_tokens=num_tokens,
        extra_body={"ignore_eos": True, "return_token_ids": True, **options},
        **{"temperature": 0.0, **known},
    )


async def output_ids(client: openai.AsyncOpenAI, prompt: Any, num_tokens: int, **options: Any) -> list[list[int]]:
    """Token ids of each choice."""
    answer = await completion(client, prompt, num_tokens, **options)
    assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    return [choice.token_ids for choice in answer.choices]


def greedy(client: openai.AsyncOpenAI, **options: Any) -> Continue:
    """How `assert_follows` gets its tokens."""

    async def continue_from(prompt: list[int], num_tokens: int) -> list[list[int]]:
        return await output_ids(client, prompt, num_tokens, **options)

    return continue_from


async def cached_tokens_of(client: openai.AsyncOpenAI, prompt: list[int], **options: Any) -> int:
    """Prompt tokens that were found in the cache."""
    answer = await completion(client, prompt, 1, **options)
    assert answer.usage.prompt_tokens == len(prompt)
    cached: int = answer.usage.prompt_tokens_details.cached_tokens
    return cached
