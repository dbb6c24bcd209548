"""Clients of the drill: requests whose answers are known, and what went wrong with them."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import orjson

from chaos.system import MODEL_NAME

_CLIENT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request with one right answer: greedy, or sampled with a seed."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = 0

    def body(self, *, stream: bool) -> dict[str, Any]:
        return {
            "model": MODEL_NAME,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "n": self.n,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }


@dataclass
class Outcome:
    """What one request brought."""

    answer: list[list[int]]
    """Token ids of each choice."""
    error: str = ""
    is_cut: bool = False
    """The connection broke: the gateway died."""
    times: list[float] = field(default_factory=list)
    """When pieces of a stream came."""

    @property
    def longest_pause_s(self) -> float:
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)


def questions(rng: random.Random, count: int, max_tokens: int, vocab_size: int) -> list[Question]:
    """Prompts of many lengths, some with a common beginning, a third of them sampled. One answer in eight is long."""
    common = tuple(rng.randrange(3, vocab_size) for _ in range(64))
    found = []
    for number in range(count):
        own = tuple(rng.randrange(3, vocab_size) for _ in range(rng.choice([2, 9, 33, 100])))
        prompt = common + own if rng.random() < 0.5 else own
        is_sampled = number % 3 == 2
        found.append(
            Question(
                prompt,
                rng.randint(max_tokens // 2, max_tokens) if number % 8 == 0 else rng.randint(1, max_tokens // 12),
                n=rng.choice([1, 3]) if is_sampled else 1,
                temperature=0.9 if is_sampled else 0.0,
                seed=number,
            )
        )
    return found


async def ask(http: httpx.AsyncClient, question: Question, outcome: Outcome | None = None) -> Outcome:
    """Stream one answer. What has come is in `outcome` meanwhile."""
    outcome = outcome or Outcome([])
    outcome.answer[:] = [[] for _ in range(question.n)]
    try:
        async with http.stream("POST", "/v1/completions", json=question.body(stream=True)) as response:
            if response.status_code != 200:
                outcome.error = f"{response.status_code} {(await response.aread()).decode(errors='replace')}"
                return outcome
            is_done = False
            async for line in response.aiter_lines():
                is_done = is_done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    _take(orjson.loads(line[6:]), outcome)
            if not outcome.error and not is_done:
                outcome.error, outcome.is_cut = "the stream broke off", True
    except httpx.TransportError as error:
        outcome.error, outcome.is_cut = f"{type(error).__name__}: {error}", True
    return outcome


def _take(chunk: dict[str, Any], outcome: Outcome) -> None:
    if "error" in chunk:
        outcome.error = str(chunk["error"])
    for choice in chunk.get("choices", ()):
        if choice.get("token_ids"):
            outcome.times.append(time.monotonic())
            outcome.answer[choice["index"]] += choice["token_ids"]


async def is_near_tie(http: httpx.AsyncClient, question: Question, outcome: Outcome, right: list[list[int]]) -> bool:
    """Whether sampled answers are wrong by rounding alone, which the other rows of a step change in the last bits.

    A draw takes the first token, by id, at which the sum of probabilities exceeds a number. If that number is within
    rounding of the sum, the token is the one before or after, and what follows is what follows that token.
    """
    for choice, (told, expected) in enumerate(zip(outcome.answer, right, strict=True)):
        if told == expected:
            continue
        same = next((at for at, pair in enumerate(zip(told, expected, strict=False)) if len(set(pair)) == 2), None)
        if same is None or not question.temperature or abs(told[same] - expected[same]) != 1:
            return False
        begun, left = question.prompt + tuple(told[: same + 1]), question.max_tokens - same - 1
        if left:
            rest = await ask(http, replace(question, prompt=begun, max_tokens=left, n=choice + 1))
            if rest.error or rest.answer[choice] != told[same + 1 :]:
                return False
    return True


def client(url: str) -> httpx.AsyncClient:
    """One for all clients of the drill."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=_CLIENT_TIMEOUT_S, trust_env=False)


@dataclass
class Tally:
    """What a time under load brought."""

    num_answered: int = 0
    num_left: int = 0
    """Clients that went away on purpose."""
    num_cut: int = 0
    """Requests of gateways that died."""
    num_near_ties: int = 0
    """Sampled answers that are another one by rounding: see `is_near_tie`."""
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    """The longest of each request."""

    def add(self, later: Tally) -> None:
        self.num_answered += later.num_answered
        self.num_left += later.num_left
        self.num_cut += later.num_cut
        self.num_near_ties += later.num_near_ties
        self.failures += later.failures
        self.wrong += later.wrong
        self.pauses_s += later.pauses_s


async def mixed_load(
    http: httpx.AsyncClient,
    known: dict[Question, list[list[int]]],
    num_clients: int,
    seconds: float,
    leaves: float,
    seed: int,
    is_open: asyncio.Event,
) -> Tally:
    """Clients that ask one question after another; the share `leaves` of them goes away before the end.

    They ask while `is_open`, as behind a load balancer, which sends nothing to a gateway that has just been started.
    """
    tally, end = Tally(), time.monotonic() + seconds

    async def one(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        while time.monotonic() < end:
            await is_open.wait()
            question = rng.choice(list(known))
            asked = asyncio.create_task(ask(http, question))
            if rng.random() < leaves:
                await asyncio.wait({asked}, timeout=rng.uniform(0.0, 1.0))
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                tally.num_left += 1
                continue
            outcome = await asked
            if outcome.is_cut:
                tally.num_cut += 1
            elif outcome.error:
                tally.failures.append(outcome.error)
            elif outcome.answer != known[question]:
                if await is_near_tie(http, question, outcome, known[question]):
                    tally.num_near_ties += 1
                else:
                    tally.wrong.append(f"{outcome.answer} is not {known[question]}, of {question}")
            else:
                tally.num_answered += 1
                tally.pauses_s.append(outcome.longest_pause_s)

    await asyncio.gather(*(one(number) for number in range(num_clients)))
    return tally
