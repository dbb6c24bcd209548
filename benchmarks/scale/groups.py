"""Worker groups as production runs them, each with a simulated worker, and what they take."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROWS_PER_GPU = 256
MAX_MODEL_LEN = 4096
PROCESSES = ("scheduler", "kvmanager", "worker", "sink")
STARTED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters of one group at one instant, in seconds and as counts."""

    at: float
    steps: float
    tokens: float
    busy_s: float
    idle_s: float
    stall_s: float
    cpu_s: dict[str, float]

    def since(self, before: Counts) -> Counts:
        """What was counted between; `at` is the time between."""
        return Counts(
            self.at - before.at,
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.busy_s - before.busy_s,
            self.idle_s - before.idle_s,
            self.stall_s - before.stall_s,
            {name: self.cpu_s[name] - before.cpu_s[name] for name in PROCESSES},
        )


class Group:
    """A scheduler, a KV manager, a worker that stands for `num_gpus` GPUs, and a source of requests."""

    def __init__(self, processes: dict[str, subprocess.Popen[bytes]], metrics_url: str, num_requests: int) -> None:
        self._processes = processes
        self._metrics_url = metrics_url
        self._num_requests = num_requests

    def is_full(self) -> bool:
        """Nearly all requests run."""
        return self._metrics().get(("octavo_queue_sequences", "running"), 0.0) >= 0.97 * self._num_requests

    def counts(self) -> Counts:
        """As of now."""
        metrics = self._metrics()
        stall_s = sum(value for (name, _), value in metrics.items() if name == "octavo_stall_seconds_total")
        return Counts(
            time.monotonic(),
            metrics["octavo_steps_total", ""],
            metrics["octavo_scheduler_output_tokens_total", ""],
            metrics["octavo_worker_busy_seconds_total", ""],
            metrics["octavo_worker_starved_seconds_total", ""],
            stall_s,
            {name: _cpu_s(process.pid) for name, process in self._processes.items()},
        )

    def _metrics(self) -> dict[tuple[str, str], float]:
        """(name, label's value) |-> value"""
        text = httpx.get(self._metrics_url, trust_env=False, timeout=20.0).raise_for_status().text
        return {
            (sample.name, next(iter(sample.labels.values()), "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@contextmanager
def running_group(folder: Path, profile: str, num_gpus: int, depth: int) -> Iterator[Group]:
    """Batch and pool grow with the GPUs: 256 requests and the profile's blocks for each."""
    num_requests = ROWS_PER_GPU * num_gpus
    address = {name: f"frames://{folder}/{name}.sock" for name in PROCESSES}
    metrics = f"127.0.0.1:{_free_port()}"
    quiet = ("--log-level", "error")
    commands = {
        "kvmanager": ["octavo.kvmanager.main", "--listen", address["kvmanager"], *quiet],
        "worker": [
            *("octavo.worker.main", "--listen", address["worker"], *quiet),
            *("--simulated", profile, "--simulated-gpus", str(num_gpus)),
            *("--max-num-seqs", str(num_requests), "--max-model-len", str(MAX_MODEL_LEN)),
        ],
        "scheduler": [
            *("octavo.scheduler.main", "--listen", address["scheduler"], *quiet),
            *("--kvmanager", address["kvmanager"], "--worker", address["worker"]),
            *("--max-num-seqs", str(num_requests), "--max-num-waiting", str(2 * num_requests)),
            *("--metrics-listen", metrics, "--pipeline-depth", str(depth)),
        ],
        "sink": [
            *("benchmarks.step_path.token_sink", "--scheduler", address["scheduler"]),
            *("--num-requests", str(num_requests), "--asks-for-length"),
        ],
    }
    with ExitStack() as stack:
        processes = {}
        for name, command in commands.items():
            process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)
            processes[name] = process
            stack.callback(process.wait)
            stack.callback(process.kill)
            if name != "sink":
                _wait_for(folder / f"{name}.sock", process)
        yield Group(processes, f"http://{metrics}/metrics", num_requests)


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"nothing listens at {path.name}")
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
