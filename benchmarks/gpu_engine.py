"""Measures a GPU worker under the real scheduler and KV manager, all in one process (the local transport).

    python benchmarks/gpu_engine.py [L1 L64 W1 W2 W3 S256] [--set NAME=VALUE ...] [--ask-for N] [--no-check]
        [--figures FILE]

The model has the shape of Llama-3.1-8B and random weights. Everything is submitted at time 0. S256 is steady decode:
what lies between the first token of the last of 256 requests and the end of the first. `--set` gives options of `octavo
serve`, for example `--set prefix_cache=false`. `--ask-for`: max_tokens of every request, whose client leaves after the
tokens that the workload says, as those do who cannot know the length of an answer. Eight requests of each workload are
compared with the torch backend afterwards (gpu_check.py), and each workload with what bounds it (gpu_limits.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_check
import gpu_limits
import uvloop
import workloads
from gpu_timing import Limits
from workloads import WORKLOADS, Workload

from octavo.cli.local_cluster import LocalCluster
from octavo.cli.models import PreparedModel
from octavo.cli.serve_options import ServeOptions
from octavo.common import logs
from octavo.common.messages.generation import (
    Abort,
    SamplingParams,
    SchedulerMessage,
    SchedulerStatus,
    Submit,
    TokenBatch,
)
from octavo.common.runtime import Stop

STALL_CAUSES = ("credits", "admission", "swap")
MIN_STEADY_STEPS = 50
"""Of all rows at once, below which their idle time is chance."""


@dataclass
class Progress:
    """One request."""

    prompt: list[int]
    num_output: int
    first_at: float = 0.0
    last_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)


class Client:
    """What a gateway is to the scheduler."""

    def __init__(self, ask_for: int | None) -> None:
        self._ask_for = ask_for
        self._link: Any = None
        self.on_steady: Callable[[bool], None] = lambda began: None
        """Called when all requests have a token, and when the first one ends."""
        self._num_started = 0
        self.is_ready = asyncio.Event()
        self.is_done = asyncio.Event()
        self.requests: dict[int, Progress] = {}
        self._num_open = 0
        self._next_no = 1

    def on_message(self, message: SchedulerMessage) -> None:
        if isinstance(message, SchedulerStatus):
            if message.ready:
                self.is_ready.set()
            return
        if not isinstance(message, TokenBatch):
            return
        now = time.perf_counter()
        for failed in message.failed:
            raise SystemExit(f"request failed: {failed.reason}: {failed.message}")
        num_ended = 0
        for token in message.tokens:
            request = self.requests[token.request_no]
            if len(request.token_ids) == request.num_output:
                continue  # on its way when the client left
            if not request.token_ids:
                request.first_at = now
                self._num_started += 1
            request.last_at = now
            request.token_ids.append(token.token_id)
            if len(request.token_ids) == request.num_output:
                num_ended += 1
                if self._ask_for is not None:
                    self._link.send(Abort(token.request_no))
        if message.tokens and self._num_started == self._num_all:
            self.on_steady(True)
        if num_ended:
            self.on_steady(False)
        self._num_open -= num_ended
        if num_ended and not self._num_open:
            self.is_done.set()

    def submit_all(self, link: Any, workload: Workload) -> list[Progress]:
        self.is_done.clear()
        self._link = link
        self._num_started, self._num_all = 0, len(workload)
        made = []
        for prompt, num_output in workload:
            number, self._next_no = self._next_no, self._next_no + 1
            self.requests[number] = Progress(prompt, num_output)
            made.append(self.requests[number])
            self._num_open += 1
            max_tokens = num_output if self._ask_for is None else max(self._ask_for, num_output)
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            link.send(Submit(number, f"r{number}", tuple(prompt), params))
        return made


async def measure(
    names: list[str], options: ServeOptions, folder: Path, ask_for: int | None, limits: Limits, figures: Path | None
) -> dict[str, list[dict[str, list[int]]]]:
    """Run and report the workloads. Returns the requests that are to be checked of each."""
    started = time.perf_counter()
    cluster = LocalCluster(options, PreparedModel(folder, "llama-8b-shape"))
    stop = Stop()
    serving = asyncio.create_task(cluster.serve_cores(stop))
    client = Client(ask_for)
    link = await cluster.connect_gateway()
    link.bind(client.on_message, lambda error: None)
    ready = asyncio.create_task(client.is_ready.wait())
    await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
    await run(cluster, client, link, workloads.equal_lengths(8, prompt=300, output=20, seed=77))
    checked = {}
    for name in names:
        requests, facts = await run(cluster, client, link, WORKLOADS[name]())
        for figure in report(name, requests, facts, limits):
            print(f"     {figure}", flush=True)
            figure.append_to(figures)
        some = [requests[index] for index in gpu_check.chosen(len(requests))]
        checked[name] = [{"prompt": one.prompt, "output": one.token_ids} for one in some]
    stop.request()
    await serving
    return checked


async def run(
    cluster: LocalCluster, client: Client, link: Any, workload: Workload
) -> tuple[list[Progress], dict[str, float]]:
    stats = cluster.scheduler.core.stats
    before = (stats.worker_busy_s, stats.worker_idle_s)
    stalls_before, preemptions_before = dict(stats.stall_s), stats.num_preemptions
    steady: list[tuple[float, float, float, float, int]] = []

    def note_steady(began: bool) -> None:
        if len(steady) == (0 if began else 1):
            num_steps = sum(len(request.token_ids) for request in requests[:1])
            stall_s = sum(stats.stall_s.values())
            steady.append((time.perf_counter(), stats.worker_busy_s, stats.worker_idle_s, stall_s, num_steps))

    client.on_steady = note_steady
    started = time.perf_counter()
    requests = client.submit_all(link, workload)
    await client.is_done.wait()
    facts = {
        "started": started,
        "seconds": time.perf_counter() - started,
        "busy_s": stats.worker_busy_s - before[0],
        "idle_s": stats.worker_idle_s - before[1],
    }
    facts |= {cause: stats.stall_s[cause] - stalls_before[cause] for cause in STALL_CAUSES}
    facts["num_preemptions"] = stats.num_preemptions - preemptions_before
    if len(steady) == 2:
        changes = [late - early for early, late in zip(*steady, strict=True)]
        names = ("steady_s", "steady_busy_s", "steady_idle_s", "steady_stall_s", "steady_steps")
        facts |= dict(zip(names, changes, strict=True))
    return requests, facts


def report(name: str, requests: list[Progress], facts: dict[str, float], limits: Limits) -> Iterator[gpu_limits.Figure]:
    assert all(len(request.token_ids) == request.num_output for request in requests), "an output has the wrong length"
    assert all(token >= 0 for request in requests for token in request.token_ids), "logits were not finite"
    num_tokens = sum(request.num_output for request in requests)
    seconds = facts["seconds"]
    ttft_ms = [1000 * (request.first_at - facts["started"]) for request in requests]
    tpot_ms = [
        1000 * (request.last_at - request.first_at) / (request.num_output - 1)
        for request in requests
        if request.num_output > 1
    ]
    print(
        f"{name:4} {seconds:7.2f} s  {num_tokens / seconds:9.0f} output tokens/s  "
        f"TTFT {statistics.median(ttft_ms):8.1f} ms  TPOT {statistics.median(tpot_ms):6.2f} ms  "
        f"GPU busy {facts['busy_s']:6.2f} s  idle {facts['idle_s']:6.3f} s "
        f"({100 * facts['idle_s'] / max(facts['busy_s'] + facts['idle_s'], 1e-9):.2f} %)",
        flush=True,
    )
    stalls = [f"{cause} {1000 * facts[cause]:.1f} ms" for cause in STALL_CAUSES if facts[cause]]
    print(f"     {facts['num_preemptions']:.0f} preemptions, stalls: {', '.join(stalls) or 'none'}", flush=True)
    workload = [(request.prompt, request.num_output) for request in requests]
    yield gpu_limits.figure_of(name, statistics.median(tpot_ms), num_tokens / seconds, workload, limits)
    if facts.get("steady_steps", 0) >= MIN_STEADY_STEPS:
        busy, idle, steps = facts["steady_busy_s"], facts["steady_idle_s"], facts["steady_steps"]
        print(
            f"     steady: {steps:.0f} steps of {len(requests)} rows in {facts['steady_s']:.2f} s, GPU busy "
            f"{1e3 * busy / steps:.3f} ms a step, idle {1e6 * idle / steps:.0f} us "
            f"({100 * idle / (busy + idle):.2f} %), no plan for want of blocks or answers "
            f"{1e6 * facts['steady_stall_s'] / steps:.0f} us",
            flush=True,
        )
        yield gpu_limits.Figure(f"{name} GPU idle", 100 * idle / (busy + idle), "%", busy / (busy + idle))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--ask-for", type=int, help="max_tokens of every request")
    parser.add_argument("--no-check", action="store_true", help="without the comparison with torch")
    parser.add_argument("--figures", type=Path, help="file to append what gpu_figures.py reads")
    parser.add_argument("--answers", type=Path, help="only measure, and leave what is to be checked in this file")
    parser.add_argument("--model", type=Path, help="a folder with config.json; default: the shape of Llama-3.1-8B")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 20480}
    settings |= {name: json.loads(value) for name, value in (one.split("=", 1) for one in arguments.set)}
    os.environ.setdefault("OCTAVO_WORKER_LOAD_FORMAT", "dummy")
    logs.configure("bench", "info", "console")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(workloads.LLAMA_8B), encoding="utf-8")
        model = arguments.model or Path(folder)
        if arguments.answers is not None or arguments.no_check:
            options = ServeOptions(**settings)
            limits = gpu_limits.measure_elsewhere()
            measuring = measure(arguments.names, options, model, arguments.ask_for, limits, arguments.figures)
            checked = uvloop.run(measuring)
            if arguments.answers is not None:
                arguments.answers.write_text(json.dumps(checked), encoding="utf-8")
            return
        answers = Path(folder) / "answers.json"  # the process that measures has to give the GPU back before the check
        command = [sys.executable, __file__, *sys.argv[1:], "--answers", str(answers), "--model", str(model)]
        subprocess.run(command, check=True)
        sys.exit(subprocess.run([sys.executable, gpu_check.__file__, str(answers), str(model)]).returncode)


if __name__ == "__main__":
    main()
