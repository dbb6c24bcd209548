"""Routing by prefix against least loaded and round robin: hit rate, time to first token, goodput.

    python benchmarks/routing.py [--groups 4] [--rates 8,12,16] [--seconds 60] [--seed 0]

The cores of schedulers and KV managers, and the gateway's router and directories, run as they are, in virtual time; the
worker is a roofline of an 8B model on a large GPU: 4.5 ms a step for the weights, 30,000 prompt tokens a second, and
the K and V that decodes read at 4 TB/s. Events reach the directories after 20 ms, loads are told every 0.5 s.

Conversations: each begins with one of `--prefixes` system prompts of 2,000 tokens (drawn by Zipf's law) and has 1 to 8
turns; a turn adds 120 tokens, the answer 150, and the user thinks for 5 s. The same conversations for every policy.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from octavo.common.block_hash import BlockHasher
from octavo.common.codecs.arrays import pack_int32
from octavo.common.messages.generation import ModelInfo, SamplingParams, SchedulerLoad, Submit, TokenBatch
from octavo.common.messages.kv import KvRequest, OpenPool
from octavo.common.messages.step import RowFlag, StepPlan, StepResult
from octavo.gateway.pool_directory import PoolDirectory, PrefixMatcher
from octavo.gateway.routing import Candidate, Router, RoutingPolicy
from octavo.kvmanager.pool import Pool, PoolSettings
from octavo.kvmanager.pool_events import EventKind
from octavo.kvmanager.stats import KvStats
from octavo.scheduler.core import SchedulerCore
from octavo.scheduler.core_settings import CoreSettings

BLOCK_SIZE = 16
GATEWAY = 1
_WEIGHTS_S = 4.5e-3
_PREFILL_TOKENS_PER_S = 30_000.0
_KV_READ_S = 131_072 / 4e12
"""Of one token of context."""
_HOP_S = 2e-4
_EVENTS_S = 0.02
_LOAD_S = 0.5
SLO_TTFT_S, SLO_TPOT_S = 0.5, 0.025


class Clock:
    """Virtual time: what is to happen, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), call))

    def run(self, is_over: Callable[[], bool]) -> None:
        while self._events and not is_over():
            self.now, _, call = heapq.heappop(self._events)
            call()


@dataclass
class Turn:
    """One request and what became of it. Times in seconds."""

    prompt: list[int]
    num_output_tokens: int
    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    num_cached: int = 0
    num_tokens: int = 0
    has_started: bool = False

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def is_good(self) -> bool:
        tpot_s = (self.end_s - self.first_s) / max(1, self.num_output_tokens - 1)
        return self.ttft_s <= SLO_TTFT_S and tpot_s <= SLO_TPOT_S


@dataclass
class Conversation:
    """Its prompts grow by what was said."""

    system: list[int]
    said: list[list[int]]
    begins_s: float


class Group:
    """Scheduler, KV manager and a worker of a pool."""

    def __init__(self, clock: Clock, num_blocks: int, max_num_seqs: int, on_end: Callable[[Turn], None]) -> None:
        self._clock, self._on_end = clock, on_end
        model = ModelInfo("8b", 32_768, 128_256, (), max_num_seqs, BLOCK_SIZE)
        self.core = SchedulerCore(CoreSettings(max_num_batched_tokens=2048))
        opening = OpenPool("pool", 1, 1, num_blocks, BLOCK_SIZE, num_host_blocks=0)
        self._pool = Pool(opening, PoolSettings(), KvStats())
        self._pool.blocks.events.watch()
        self._position = self._pool.blocks.events.last
        self.directory = PoolDirectory()
        self.directory.clear(BlockHasher(BLOCK_SIZE))
        self.turns: dict[int, Turn] = {}
        self._numbers = itertools.count(1)
        self.load = SchedulerLoad()
        self._free_at = 0.0
        self.core.start(model, num_blocks, 2048)
        self._advance()
        self._tell()
        self._tell_load()

    def submit(self, turn: Turn) -> None:
        number = next(self._numbers)
        self.turns[number] = turn
        params = SamplingParams(max_tokens=turn.num_output_tokens, temperature=0.0, ignore_eos=True)
        self.core.on_submit(GATEWAY, Submit(number, f"r{number}", tuple(turn.prompt), params))
        self._advance()

    def candidate(self, num_matched_tokens: int) -> Candidate:
        waiting = sum(len(turn.prompt) for turn in self.turns.values() if not turn.has_started)
        return Candidate(self.load, num_matched_tokens, len(self.turns), waiting, BLOCK_SIZE)

    def _advance(self) -> None:
        outbox = self.core.advance(self._clock.now)
        for plan in outbox.plans:
            self._launch(plan)
        if outbox.kv_request is not None:
            request = outbox.kv_request
            self._clock.after(_HOP_S, lambda: self._serve(request))
        if (batch := outbox.batches.get(GATEWAY)) is not None:
            self._take(batch)

    def _serve(self, request: KvRequest) -> None:
        reply = self._pool.apply(request)
        while self._pool.hash_slice():
            pass
        self.core.on_kv_reply(reply)
        self._advance()

    def _launch(self, plan: StepPlan) -> None:
        is_prefill = [length > 1 for length in plan.lengths]
        num_prefill = sum(itertools.compress(plan.lengths, is_prefill))
        num_context = sum(start for start, skipped in zip(plan.starts, is_prefill, strict=True) if not skipped)
        duration = _WEIGHTS_S + num_prefill / _PREFILL_TOKENS_PER_S + num_context * _KV_READ_S if plan.slots else 1e-5
        begins = max(self._clock.now + _HOP_S, self._free_at)
        idle_us = round(1e6 * (begins - self._free_at))
        self._free_at = begins + duration
        samples = sum(bool(flags & RowFlag.SAMPLE) for flags in plan.flags)
        result = StepResult(plan.step_id, [7] * samples, [], round(1e6 * duration), idle_us)
        self._clock.after(self._free_at + _HOP_S - self._clock.now, lambda: self._accept(result))

    def _accept(self, result: StepResult) -> None:
        self.core.on_step_result(result)
        self._advance()

    def _take(self, batch: TokenBatch) -> None:
        for started in batch.started:
            turn = self.turns[started.request_no]
            turn.has_started, turn.num_cached = True, started.num_cached_tokens
        for number in batch.request_nos:
            turn = self.turns[number]
            turn.num_tokens += 1
            turn.first_s = turn.first_s or self._clock.now
        assert not batch.failed, batch.failed
        for end in batch.finished:
            turn = self.turns.pop(end.request_no)
            turn.end_s = self._clock.now
            self._on_end(turn)

    def _tell(self) -> None:
        """Events reach the gateway."""
        while news := self._pool.blocks.events.after(self._position, 512):
            self._position += len(news)
            for event in news:
                is_kept = event.kind in (EventKind.STORED, EventKind.RESTORED)
                (self.directory.store if is_kept else self.directory.drop)(event.digest, event.tier)
        self._clock.after(_EVENTS_S, self._tell)

    def _tell_load(self) -> None:
        self.load = self.core.load
        self._clock.after(_LOAD_S, self._tell_load)


@dataclass
class Report:
    """Of one policy at one rate."""

    turns: list[Turn] = field(default_factory=list)
    num_by_group: list[int] = field(default_factory=list)

    def row(self, policy: str, rate: float) -> str:
        ttft_ms = 1e3 * np.array([turn.ttft_s for turn in self.turns])
        hits = sum(turn.num_cached for turn in self.turns) / sum(len(turn.prompt) for turn in self.turns)
        good = sum(turn.is_good for turn in self.turns)
        span_s = max(turn.end_s for turn in self.turns) - min(turn.sent_s for turn in self.turns)
        p50, p99 = np.percentile(ttft_ms, (50, 99))
        least, most = min(self.num_by_group), max(self.num_by_group)
        return (
            f"{policy:<13} {rate:>6.1f} {len(self.turns):>6} {hits:>8.1%} {p50:>8.0f} {p99:>8.0f} "
            f"{good / len(self.turns):>8.1%} {good / span_s:>8.2f} {least:>6} {most:>6}"
        )


def conversations(rate: float, seconds: float, num_prefixes: int, seed: int) -> list[Conversation]:
    """`rate`: conversations a second."""
    draw = np.random.Generator(np.random.PCG64(seed))
    prefixes = draw.integers(100, 127_000, (num_prefixes, 2000)).tolist()
    weights = 1 / np.arange(1, num_prefixes + 1)
    begins, found = 0.0, []
    while (begins := begins + draw.exponential(1 / rate)) < seconds:
        system = prefixes[draw.choice(num_prefixes, p=weights / weights.sum())]
        said = draw.integers(100, 127_000, (int(draw.integers(1, 9)), 120)).tolist()
        found.append(Conversation(system, said, begins))
    return found


def play(policy: RoutingPolicy, talks: Sequence[Conversation], num_groups: int, num_blocks: int) -> Report:
    """All conversations to their end."""
    clock, report, router = Clock(), Report(num_by_group=[0] * num_groups), Router(policy)
    following: dict[int, Callable[[], None]] = {}

    def on_end(turn: Turn) -> None:
        report.turns.append(turn)
        following.pop(id(turn))()

    groups = {str(index): Group(clock, num_blocks, 128, on_end) for index in range(num_groups)}

    def send(prompt: list[int], left: deque[list[int]]) -> None:
        turn = Turn(prompt, 150, sent_s=clock.now)

        def after() -> None:
            if left:
                grown = [*prompt, *[7] * turn.num_output_tokens, *left.popleft()]
                clock.after(5.0, lambda: send(grown, left))
            else:
                ended.append(turn)

        following[id(turn)] = after
        matcher = PrefixMatcher(pack_int32(prompt), b"")
        matched = {name: matcher.num_matched_tokens(group.directory) for name, group in groups.items()}
        chosen = router.choose(len(prompt), [(name, group.candidate(matched[name])) for name, group in groups.items()])
        report.num_by_group[int(chosen)] += 1
        groups[chosen].submit(turn)

    ended: list[Turn] = []
    for talk in talks:
        said = deque(talk.said)
        clock.after(talk.begins_s, lambda talk=talk, said=said: send([*talk.system, *said.popleft()], said))  # type: ignore[misc]
    clock.run(lambda: len(ended) == len(talks))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rates", default="4,8,12", help="conversations a second, of all groups")
    parser.add_argument("--seconds", type=float, default=60.0, help="in which conversations begin")
    parser.add_argument("--prefixes", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=8000, help="of each pool")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(f"{asked.groups} groups of {asked.blocks} blocks, {asked.prefixes} system prompts, seed {asked.seed}")
    print(f"SLO: TTFT {SLO_TTFT_S * 1e3:.0f} ms, TPOT {SLO_TPOT_S * 1e3:.0f} ms")
    print("policy          talks  turns     hits ttft p50 ttft p99     good   good/s  least   most")
    for rate in map(float, asked.rates.split(",")):
        talks = conversations(rate, asked.seconds, asked.prefixes, asked.seed)
        for policy in get_args(RoutingPolicy):
            print(play(policy, talks, asked.groups, asked.blocks).row(policy, rate), flush=True)


if __name__ == "__main__":
    main()
