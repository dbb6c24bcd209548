"""Drives schedulers and KV managers as if with many GPUs, and prints where the control plane is at its end.

A setting `4x16` is four worker groups of 16 GPUs, each group with a scheduler, a KV manager and a simulated worker of
its own, in processes joined by frames. A GPU has 256 requests of 200 prompt tokens and 50 to 400 output tokens, and the
profile's blocks; a request that ends is replaced at once. Idle is the share of time in which a worker had no step to
run, stall the share in which the scheduler could have launched one and had no blocks for it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.scale.groups import PROCESSES, ROWS_PER_GPU, Counts, running_group

FULL_WITHIN_S = 60.0
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How many groups, of how many GPUs each."""

    num_groups: int
    num_gpus: int

    @classmethod
    def parse(cls, text: str) -> Setting:
        """`4x16`, or `16` for one group."""
        groups, _, gpus = text.rpartition("x")
        return cls(int(groups or 1), int(gpus))

    def __str__(self) -> str:
        return f"{self.num_groups} x {self.num_gpus}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one measurement gave, over all groups."""

    setting: Setting
    is_full: bool
    """All requests ran when it began; else the control plane did not come so far."""
    counts: list[Counts]

    def _mean(self, of: str) -> float:
        return sum(getattr(one, of) for one in self.counts) / len(self.counts)

    @property
    def steps_per_s(self) -> float:
        """Of one group."""
        return self._mean("steps") / self._mean("at")

    @property
    def step_ms(self) -> float:
        """What a step takes on the GPUs."""
        return 1e3 * self._mean("busy_s") / max(1.0, self._mean("steps"))

    @property
    def tokens_per_s(self) -> float:
        """Of all groups."""
        return sum(one.tokens / one.at for one in self.counts)

    def share(self, of: str) -> float:
        """Of the time of a group."""
        return self._mean(of) / self._mean("at")

    def cpu_ms(self, process: str) -> float:
        """CPU a step of one group."""
        return 1e3 * sum(one.cpu_s[process] for one in self.counts) / max(1.0, sum(one.steps for one in self.counts))

    def control_us_per_token(self) -> float:
        """CPU of schedulers and KV managers for a token."""
        used = sum(one.cpu_s["scheduler"] + one.cpu_s["kvmanager"] for one in self.counts)
        return 1e6 * used / max(1.0, sum(one.tokens for one in self.counts))


def measure(setting: Setting, profile: str, depth: int, seconds: float) -> Outcome:
    """Start the groups, wait until they are full, and count for `seconds`."""
    with tempfile.TemporaryDirectory(prefix="octavo-scale-") as run_dir, ExitStack() as stack:
        groups = []
        for number in range(setting.num_groups):
            folder = Path(run_dir, str(number))
            folder.mkdir()
            groups.append(stack.enter_context(running_group(folder, profile, setting.num_gpus, depth)))
        deadline = time.monotonic() + FULL_WITHIN_S
        while not (is_full := all(group.is_full() for group in groups)) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(SETTLE_S)
        before = [group.counts() for group in groups]
        time.sleep(seconds)
        counts = [group.counts().since(then) for group, then in zip(groups, before, strict=True)]
        return Outcome(setting, is_full, counts)


def show(outcomes: list[Outcome], console: Console) -> None:
    table = Table(
        title=f"{ROWS_PER_GPU} requests a GPU, {os.cpu_count()} CPU cores",
        title_justify="left",
        caption="CPU: scheduler + KV manager + worker + sink; us a token: of the first two. * not all requests ran yet",
    )
    table.add_column("groups x GPUs", no_wrap=True)
    for column in (
        "GPU step ms",
        "steps/s",
        "of ideal",
        "idle %",
        "stall %",
        "tokens/s",
        "CPU ms a step",
        "control us/token",
    ):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        table.add_row(
            f"{outcome.setting}{'' if outcome.is_full else ' *'}",
            f"{outcome.step_ms:.2f}",
            f"{outcome.steps_per_s:.1f}",
            f"{outcome.steps_per_s * outcome.step_ms / 1e3:.3f}",
            f"{100 * outcome.share('idle_s'):.2f}",
            f"{100 * outcome.share('stall_s'):.2f}",
            f"{outcome.tokens_per_s:,.0f}",
            " + ".join(f"{outcome.cpu_ms(process):.2f}" for process in PROCESSES),
            f"{outcome.control_us_per_token():.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=["1", "4", "16", "64", "4x1", "4x4"], help="such as 16 or 4x16")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--profile", default="h200-llama-8b", help="of the simulated workers")
    parser.add_argument("--depth", type=int, default=2, help="steps on their way at once")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by the way that ends the groups
    chosen = [Setting.parse(text) for text in arguments.settings]
    outcomes = [
        measure(setting, arguments.profile, arguments.depth, arguments.seconds)
        for setting in track(chosen, description="measuring", console=Console(stderr=True))
    ]
    show(outcomes, Console(width=160))
    if arguments.json:
        figures = [
            {
                "setting": str(outcome.setting),
                "steps_per_s": outcome.steps_per_s,
                "step_ms": outcome.step_ms,
                "idle": outcome.share("idle_s"),
                "stall": outcome.share("stall_s"),
                "tokens_per_s": outcome.tokens_per_s,
                "cpu_ms": {process: outcome.cpu_ms(process) for process in PROCESSES},
                "control_us_per_token": outcome.control_us_per_token(),
                "is_full": outcome.is_full,
            }
            for outcome in outcomes
        ]
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
