"""Runs many seeds in several processes, and sums what they did."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

import structlog

from octavo.simulator.simulation import SeedReport, run_seed

CHUNK = 10
"""Seeds that a process takes at a time."""


@dataclass(frozen=True, slots=True)
class SeedFailure:
    """A seed that found a fault."""

    seed: int
    error: str
    """The last line: class and message."""
    traceback: str

    @property
    def replay_command(self) -> str:
        return f"octavo-simulator --seed {self.seed} --trace"


@dataclass(slots=True)
class Summary:
    """What all seeds did together."""

    num_seeds: int = 0
    num_steps: int = 0
    num_requests: int = 0
    num_faults: int = 0
    num_deliveries: int = 0
    min_steps: int | None = None
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    num_seeds_with: Counter[str] = field(default_factory=Counter)
    """Name |-> seeds in which it happened at least once."""
    failures: list[SeedFailure] = field(default_factory=list)

    def add(self, outcome: SeedReport | SeedFailure) -> None:
        self.num_seeds += 1
        if isinstance(outcome, SeedFailure):
            self.failures.append(outcome)
            return
        self.num_steps += outcome.num_steps
        self.num_requests += outcome.num_requests
        self.num_faults += outcome.num_faults
        self.num_deliveries += outcome.num_deliveries
        self.min_steps = min(self.min_steps or outcome.num_steps, outcome.num_steps)
        self.virtual_s += outcome.virtual_s
        self.counts.update(outcome.counts)
        self.num_seeds_with.update(name for name, times in outcome.counts.items() if times)


def silence_logs() -> None:
    """The services warn of what the simulator does to them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def try_seed(seed: int, trace: Callable[[str], None] | None = None) -> SeedReport | SeedFailure:
    """Run one seed; whatever it raises is a failure."""
    try:
        return run_seed(seed, trace)
    except Exception as error:
        last_line = traceback.format_exception_only(error)[-1].strip()
        return SeedFailure(seed, last_line, traceback.format_exc())


def run_seeds(
    seeds: Iterable[int], num_jobs: int, max_failures: int | None = None
) -> Iterator[SeedReport | SeedFailure]:
    """The outcome of each seed, in no certain order. After `max_failures` failures no more are begun."""
    waiting = list(seeds)
    chunks = [waiting[begin : begin + CHUNK] for begin in range(0, len(waiting), CHUNK)]
    num_failures = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context, initializer=_prepare_process) as processes:
        running = [processes.submit(_try_chunk, chunk) for chunk in chunks]
        for done in as_completed(running):
            for outcome in done.result():
                num_failures += isinstance(outcome, SeedFailure)
                yield outcome
            if max_failures is not None and num_failures >= max_failures:
                processes.shutdown(cancel_futures=True)
                return


def _prepare_process() -> None:
    silence_logs()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def _try_chunk(seeds: list[int]) -> list[SeedReport | SeedFailure]:
    return [try_seed(seed) for seed in seeds]
