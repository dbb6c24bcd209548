"""Completions by token ids over plain HTTP: what tests on a GPU machine need, which may lack the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from support.clusters import Cluster
from support.reference_tokens import Continue

SERVED_NAME = "served"


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client without limits on connections or on waiting."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=300.0, limits=limits) as client:
        yield client


def body_of(prompt: list[int], num_tokens: int, **options: Any) -> dict[str, Any]:
    """A greedy completion of exactly `num_tokens` tokens."""
    always = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    return {**always, "ignore_eos": True, "return_token_ids": True, **options}


def greedy(client: httpx.AsyncClient, **options: Any) -> Continue:
    """How `assert_follows` gets its tokens."""

    async def continue_from(prompt: list[int], num_tokens: int) -> list[list[int]]:
        answer = await client.post("/v1/completions", json=body_of(prompt, num_tokens, **options))
        assert answer.status_code == 200, answer.text
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    return continue_from


async def cached_tokens_of(client: httpx.AsyncClient, prompt: list[int], **options: Any) -> int:
    """Prompt tokens that were found in the cache."""
    answer = await client.post("/v1/completions", json=body_of(prompt, 1, **options))
    cached: int = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def leave_after(client: httpx.AsyncClient, prompt: list[int], num_tokens: int, **options: Any) -> int:
    """Start a stream of a long answer and go away after some tokens. Returns how many came."""
    num_seen = 0
    body = body_of(prompt, 4 * num_tokens + 100, stream=True, **options)
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                num_seen += sum(len(choice.get("token_ids") or []) for choice in choices)
            if num_seen >= num_tokens:
                break
    await asyncio.sleep(0)
    return num_seen
