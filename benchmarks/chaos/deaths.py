"""One death at a time under steady streams, then deaths at random moments under mixed load."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import numpy as np

from chaos.load import Outcome, Question, Tally, ask, mixed_load
from chaos.system import SERVICES, System

KINDS = [
    ("worker", signal.SIGKILL),
    ("kvmanager", signal.SIGKILL),
    ("scheduler", signal.SIGKILL),
    ("gateway", signal.SIGKILL),
    ("worker", signal.SIGTERM),
    ("kvmanager", signal.SIGTERM),
    ("scheduler", signal.SIGTERM),
]
_TOKENS_BEFORE = 8
"""Each stream has so many when the service dies."""
_KNOWN_LONG = 11.0
"""Seconds without a death after which the supervisor counts anew."""


@dataclass
class Deaths:
    """What one kind of death did, over all rounds."""

    service: str
    signal_no: signal.Signals
    pauses_s: list[float] = field(default_factory=list)
    """The longest of each stream."""
    num_recomputed: list[int] = field(default_factory=list)
    """Tokens that were computed again, by round."""
    num_held: list[int] = field(default_factory=list)
    """Tokens of prompts and outputs that were there when it died, by round."""
    failures: list[str] = field(default_factory=list)
    num_cut: int = 0

    def row(self) -> str:
        pauses = np.quantile(self.pauses_s, (0.5, 0.99)) if self.pauses_s else (0.0, 0.0)
        recomputed, held = np.mean(self.num_recomputed), np.mean(self.num_held)
        failed = f"{self.num_cut} cut" if self.service == "gateway" else str(len(self.failures))
        cells = (
            f"{self.service}, {self.signal_no.name}",
            f"{pauses[0]:.2f}",
            f"{pauses[1]:.2f}",
            "-" if self.service == "gateway" else f"{recomputed:.0f} of {held:.0f}",
            failed,
        )
        return "| " + " | ".join(cells) + " |"


HEADER = """| what | pause p50 s | p99 s | tokens computed again | failed |
| --- | ---: | ---: | ---: | ---: |"""


async def one_at_a_time(
    system: System, http: httpx.AsyncClient, known: dict[Question, list[list[int]]], rounds: int, services: list[str]
) -> list[Deaths]:
    """Each kind of death of these services, `rounds` times, while a stream of each question runs."""
    found = [Deaths(service, signal_no) for service, signal_no in KINDS if service in services]
    for round_no in range(rounds):
        for deaths in found:
            await _one_death(system, http, known, deaths)
            print(f"  round {round_no + 1}: {deaths.row()}", flush=True)
    return found


async def _one_death(
    system: System, http: httpx.AsyncClient, known: dict[Question, list[list[int]]], deaths: Deaths
) -> None:
    streams = {question: Outcome([]) for question in known}
    tasks = [asyncio.create_task(ask(http, question, outcome)) for question, outcome in streams.items()]
    while any(len(one.times) < _TOKENS_BEFORE and not one.error for one in streams.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    held = sum(len(question.prompt) + sum(map(len, outcome.answer)) for question, outcome in streams.items())
    before = await _num_prefilled(system)
    old_pid = system.pids()["worker"]
    system.kill(deaths.service, deaths.signal_no)
    killed_at = time.monotonic()
    await asyncio.gather(*tasks)
    if deaths.service == "gateway":
        deaths.num_cut += sum(outcome.is_cut for outcome in streams.values())
        await system.wait_until_ready()
        deaths.pauses_s.append(time.monotonic() - killed_at)
    for question, outcome in streams.items():
        if outcome.error and not (outcome.is_cut and deaths.service == "gateway"):
            deaths.failures.append(outcome.error)
        elif not outcome.error and outcome.answer != known[question]:
            deaths.failures.append(f"a wrong answer to {question}")
        if deaths.service != "gateway":
            deaths.pauses_s.append(outcome.longest_pause_s)
    await system.wait_until_ready()
    after = await _num_prefilled(system)
    deaths.num_recomputed.append(int(after if system.pids()["worker"] != old_pid else after - before))
    deaths.num_held.append(held)
    await system.wait_until_clean()
    await asyncio.sleep(max(0.0, _KNOWN_LONG - (time.monotonic() - killed_at)))


async def _num_prefilled(system: System) -> float:
    return await asyncio.to_thread(system.metric, "worker", "octavo_worker_tokens_total", kind="prefill")


async def at_random(
    system: System,
    http: httpx.AsyncClient,
    known: dict[Question, list[list[int]]],
    num_clients: int,
    seconds: float,
    gap_s: tuple[float, float],
    seed: int,
) -> tuple[Tally, Counter[str]]:
    """Kill one service after another, each as often as the others, at random moments."""
    rng, num_kills, end = random.Random(seed), Counter[str](), time.monotonic() + seconds

    is_open = asyncio.Event()
    is_open.set()

    async def reopen() -> None:
        await system.wait_until_ready()
        is_open.set()

    async def kill() -> None:
        reopening: asyncio.Task[None] | None = None
        while time.monotonic() < end:
            for service in rng.sample(SERVICES, len(SERVICES)):
                await asyncio.sleep(rng.uniform(*gap_s))
                if service == "gateway":
                    is_open.clear()
                num_kills[service] += system.kill(service)
                if service == "gateway":
                    reopening = asyncio.create_task(reopen())
        if reopening is not None:
            await reopening

    killing = asyncio.create_task(kill())
    tally = await mixed_load(http, known, num_clients, seconds, 0.15, seed, is_open)
    await killing
    await system.wait_until_ready()
    await system.wait_until_clean()
    return tally, num_kills
