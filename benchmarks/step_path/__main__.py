"""Runs scheduler and KV manager as in production, with a clock for a GPU, and prints what the boundaries cost.

Each row is one way to join them: one process (the baseline), frames over Unix sockets, gRPC; with and without pauses
of the KV manager. Idle is the share of time in which the clock had no step to run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.step_path.clock_worker import ClockWorker
from benchmarks.step_path.token_sink import TokenSink
from octavo.common.links import Address, local_pair
from octavo.common.runtime import Stop
from octavo.kvmanager.config import KvManagerConfig
from octavo.kvmanager.server import KvManagerServer
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.server import SchedulerServer

WARM_UP_S = 3.0
SERVICES = ("scheduler", "kvmanager", "worker", "sink")


@dataclass(frozen=True, slots=True)
class Setting:
    """One measurement."""

    label: str
    carrier: str
    """local, frames or grpc"""
    num_requests: int
    step_ms: float
    depth: int = 2
    pause_ms: int = 0
    """The KV manager is stopped for so long once a second."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one measurement gave."""

    setting: Setting
    worker: dict[str, float]
    cpu_ms: dict[str, float]
    """CPU per step and process."""


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_processes(setting: Setting, seconds: float, num_blocks: int) -> Outcome:
    """Four processes."""
    with ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-bench-"))
        scheme = "frames" if setting.carrier == "frames" else "grpc+unix"
        address = {name: f"{scheme}://{run_dir}/{name}.sock" for name in SERVICES}
        commands = {
            "kvmanager": ["-m", "octavo.kvmanager.main", "--listen", address["kvmanager"], "--log-level", "warning"],
            "worker": [
                *("-m", "benchmarks.step_path.clock_worker", "--listen", address["worker"]),
                *("--step-ms", str(setting.step_ms), "--num-blocks", str(num_blocks)),
                *("--max-num-seqs", str(setting.num_requests)),
            ],
            "scheduler": [
                *("-m", "octavo.scheduler.main", "--listen", address["scheduler"], "--log-level", "error"),
                *("--kvmanager", address["kvmanager"], "--worker", address["worker"]),
                *("--max-num-seqs", str(setting.num_requests), "--pipeline-depth", str(setting.depth)),
            ],
            "sink": [
                *("-m", "benchmarks.step_path.token_sink", "--scheduler", address["scheduler"]),
                *("--num-requests", str(setting.num_requests)),
            ],
        }
        processes = {}
        for name, command in commands.items():
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
            processes[name] = process
            stack.callback(process.kill)
            if name != "sink":
                _wait_for(Path(run_dir, f"{name}.sock"))
        time.sleep(WARM_UP_S)
        for name in ("worker", "sink"):
            processes[name].send_signal(signal.SIGUSR1)
        before = {name: _cpu_s(process.pid) for name, process in processes.items()}
        _wait(seconds, processes["kvmanager"], setting.pause_ms)
        cpu_s = {name: _cpu_s(process.pid) - before[name] for name, process in processes.items()}
        outputs = {}
        for name in ("worker", "sink"):
            processes[name].terminate()
            outputs[name] = json.loads(processes[name].communicate(timeout=10)[0])
        worker = outputs["worker"]
        cpu_ms = {name: 1e3 * used / max(1, worker["num_steps"]) for name, used in cpu_s.items()}
        return Outcome(setting, worker, cpu_ms)


def _wait_for(path: Path, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens at {path.name}")
        time.sleep(0.02)


def _wait(seconds: float, paused: subprocess.Popen[str], pause_ms: int) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if not pause_ms:
            time.sleep(left)
            continue
        paused.send_signal(signal.SIGSTOP)
        time.sleep(pause_ms / 1e3)
        paused.send_signal(signal.SIGCONT)
        time.sleep(1 - pause_ms / 1e3)


async def measure_local(setting: Setting, seconds: float, num_blocks: int) -> Outcome:
    """One process: the same cores joined by function calls."""
    here = Address("local", "bench")
    kvmanager = KvManagerServer(KvManagerConfig(listen=[here]).pool_settings, boot_epoch=1)
    worker = ClockWorker(setting.step_ms / 1e3, num_blocks, setting.num_requests, seed=1)

    async def join(accept: Callable[[Any], None]) -> Any:
        client, server = local_pair()
        accept(server)
        return client

    scheduler = SchedulerServer(
        SchedulerConfig(
            listen=[here],
            kvmanager=here,
            worker=here,
            max_num_seqs=setting.num_requests,
            pipeline_depth=setting.depth,
        ),
        connect_kvmanager=lambda: join(kvmanager.accept),
        connect_worker=lambda: join(worker.accept),
    )
    stop = Stop()
    running = asyncio.create_task(scheduler.run(stop))
    TokenSink(await join(scheduler.accept), setting.num_requests, seed=2)
    await asyncio.sleep(WARM_UP_S)
    worker.reset_measures()
    before = time.process_time()
    await asyncio.sleep(seconds)
    measures = worker.measures()
    cpu_ms = {"all in one": 1e3 * (time.process_time() - before) / max(1.0, measures["num_steps"])}
    running.cancel()
    return Outcome(setting, measures, cpu_ms)


def show(outcomes: list[Outcome], console: Console) -> None:
    table = Table(
        title=f"Step path, {outcomes[0].setting.num_requests} sequences: what the process boundaries cost",
        title_justify="left",
        caption="CPU: scheduler + KV manager + worker + sink = all",
    )
    table.add_column("setting", no_wrap=True)
    for column in ("idle %", "steps/s", "of ideal", "slack p50 / p1 ms", "CPU ms a step"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        worker, cpu = outcome.worker, outcome.cpu_ms
        steps_per_s = worker["num_steps"] / worker["elapsed_s"]
        parts = " + ".join(f"{cpu[name]:.2f}" for name in SERVICES if name in cpu)
        table.add_row(
            outcome.setting.label,
            f"{100 * worker['idle_s'] / worker['elapsed_s']:.2f}",
            f"{steps_per_s:.1f}",
            f"{steps_per_s * outcome.setting.step_ms / 1e3:.3f}",
            f"{worker['slack_p50_ms']:.2f} / {worker['slack_p1_ms']:.2f}",
            f"{parts} = {sum(cpu.values()):.2f}" if parts else f"{sum(cpu.values()):.2f}",
        )
    console.print(table)


def settings(num_requests: int, quick: bool) -> list[Setting]:
    chosen = []
    for step_ms in (5.0, 2.0):
        name = f"{step_ms:g} ms"
        chosen += [
            Setting(f"{name}: one process", "local", num_requests, step_ms),
            Setting(f"{name}: frames", "frames", num_requests, step_ms),
            Setting(f"{name}: gRPC", "grpc", num_requests, step_ms),
        ]
    if not quick:
        chosen += [
            Setting(f"5 ms: frames, {pause} ms pauses", "frames", num_requests, 5.0, pause_ms=pause)
            for pause in (20, 100)
        ]
        chosen.append(Setting("5 ms: one process, depth 1", "local", num_requests, 5.0, depth=1))
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one measurement")
    parser.add_argument("--num-requests", type=int, default=256, help="sequences alive at once")
    parser.add_argument("--num-blocks", type=int, default=20_000, help="blocks in the pool")
    parser.add_argument("--quick", action="store_true", help="without pauses and depth 1")
    parser.add_argument("--only", help="settings whose label contains this")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    console = Console()
    outcomes = []
    chosen = [s for s in settings(arguments.num_requests, arguments.quick) if (arguments.only or "") in s.label]
    for setting in track(chosen, description="measuring", console=Console(stderr=True)):
        if setting.carrier == "local":
            outcomes.append(uvloop.run(measure_local(setting, arguments.seconds, arguments.num_blocks)))
        else:
            outcomes.append(measure_processes(setting, arguments.seconds, arguments.num_blocks))
    show(outcomes, console)
    if arguments.json:
        figures = [{"label": o.setting.label, "worker": o.worker, "cpu_ms": o.cpu_ms} for o in outcomes]
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
