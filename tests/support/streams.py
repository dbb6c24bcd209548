"""Completions as streams over the official client, with the moments at which things came."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import openai

from support.completions import SERVED_NAME, greedy
from support.reference_tokens import Reference, assert_follows


@dataclass
class Stream:
    """What one stream of one choice has brought so far."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    error: openai.APIError | None = None
    first_token_at: float | None = None
    ended_at: float | None = None

    async def run(self, client: openai.AsyncOpenAI, prompt: list[int], num_tokens: int, **options: Any) -> None:
        """Read to the end, or to the error that ends it."""
        extra = {"ignore_eos": True, "return_token_ids": True, **options}
        try:
            chunks = await client.completions.create(
                model=SERVED_NAME, prompt=prompt, max_tokens=num_tokens, temperature=0, stream=True, extra_body=extra
            )
            async for chunk in chunks:
                for choice in chunk.choices:
                    self._take(choice)
        except openai.APIError as error:
            self.error = error
        self.ended_at = time.monotonic()

    def start(
        self, client: openai.AsyncOpenAI, prompt: list[int], num_tokens: int, **options: Any
    ) -> asyncio.Task[None]:
        return asyncio.create_task(self.run(client, prompt, num_tokens, **options))

    async def has_tokens(self, num_tokens: int, within_s: float = 20.0) -> None:
        """Wait until so many are here."""
        async with asyncio.timeout(within_s):
            while len(self.token_ids) < num_tokens:
                assert self.error is None, self.error
                await asyncio.sleep(0.002)

    def _take(self, choice: Any) -> None:
        new: list[int] = choice.token_ids or []
        if new and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self.token_ids += new
        self.text += choice.text
        if choice.finish_reason is not None:
            self.finish_reasons.append(choice.finish_reason)


async def assert_tokens_follow(stream: Stream, reference: Reference, client: openai.AsyncOpenAI) -> None:
    """The stream's tokens first; what comes after a forgiven mismatch is asked for anew."""
    asked: list[int] = []

    async def continue_from(prompt: list[int], num_tokens: int) -> list[list[int]]:
        asked.append(num_tokens)
        return [stream.token_ids] if len(asked) == 1 else await greedy(client)(prompt, num_tokens)

    await assert_follows(reference, continue_from)
