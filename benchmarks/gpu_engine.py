"""Measures a GPU worker under the real scheduler and KV manager, all in one process (the local transport).

    python benchmarks/gpu_engine.py [L1 L64 W1 W2 W3] [--set NAME=VALUE ...]

The model has the shape of Llama-3.1-8B and random weights. Everything is submitted at time 0. `--set` gives options of
`octavo serve`, for example `--set prefix_cache=false`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
import workloads
from workloads import Workload

from octavo.cli.local_cluster import LocalCluster
from octavo.cli.models import PreparedModel
from octavo.cli.serve_options import ServeOptions
from octavo.common import logs
from octavo.common.messages.generation import SamplingParams, SchedulerMessage, SchedulerStatus, Submit
from octavo.common.runtime import Stop

WORKLOADS = {
    "L1": lambda: workloads.equal_lengths(1),
    "L64": lambda: workloads.equal_lengths(64),
    "W1": workloads.chat_like,
    "W2": workloads.shared_prefix,
    "W3": workloads.long_prompts,
}


@dataclass
class Progress:
    """One request."""

    num_output: int
    first_at: float = 0.0
    last_at: float = 0.0
    token_ids: list[int] = field(default_factory=list)


class Client:
    """What a gateway is to the scheduler."""

    def __init__(self) -> None:
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
        now = time.perf_counter()
        for failed in message.failed:
            raise SystemExit(f"request failed: {failed.reason}: {failed.message}")
        for token in message.tokens:
            request = self.requests[token.request_no]
            if not request.token_ids:
                request.first_at = now
            request.last_at = now
            request.token_ids.append(token.token_id)
        self._num_open -= len(message.finished)
        if message.finished and not self._num_open:
            self.is_done.set()

    def submit_all(self, link: Any, workload: Workload) -> list[Progress]:
        self.is_done.clear()
        made = []
        for prompt, num_output in workload:
            number, self._next_no = self._next_no, self._next_no + 1
            self.requests[number] = Progress(num_output)
            made.append(self.requests[number])
            self._num_open += 1
            params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
            link.send(Submit(number, f"r{number}", tuple(prompt), params))
        return made


async def measure(names: list[str], options: ServeOptions, folder: Path) -> None:
    started = time.perf_counter()
    cluster = LocalCluster(options, PreparedModel(folder, "llama-8b-shape"))
    stop = Stop()
    serving = asyncio.create_task(cluster.serve_cores(stop))
    client = Client()
    link = await cluster.connect_gateway()
    link.bind(client.on_message, lambda error: None)
    ready = asyncio.create_task(client.is_ready.wait())
    await asyncio.wait({ready, serving}, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
    await run(cluster, client, link, workloads.equal_lengths(8, prompt=300, output=20, seed=77))
    for name in names:
        report(name, *await run(cluster, client, link, WORKLOADS[name]()))
    stop.request()
    await serving


async def run(
    cluster: LocalCluster, client: Client, link: Any, workload: Workload
) -> tuple[list[Progress], dict[str, float]]:
    stats = cluster.scheduler.core.stats
    before = (stats.worker_busy_s, stats.worker_idle_s)
    started = time.perf_counter()
    requests = client.submit_all(link, workload)
    await client.is_done.wait()
    facts = {
        "started": started,
        "seconds": time.perf_counter() - started,
        "busy_s": stats.worker_busy_s - before[0],
        "idle_s": stats.worker_idle_s - before[1],
    }
    return requests, facts


def report(name: str, requests: list[Progress], facts: dict[str, float]) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--model", type=Path, help="a folder with config.json; default: the shape of Llama-3.1-8B")
    arguments = parser.parse_args()
    settings: dict[str, Any] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 20480}
    settings |= {name: json.loads(value) for name, value in (one.split("=", 1) for one in arguments.set)}
    os.environ.setdefault("OCTAVO_WORKER_LOAD_FORMAT", "dummy")
    logs.configure("bench", "info", "console")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(workloads.LLAMA_8B), encoding="utf-8")
        uvloop.run(measure(arguments.names, ServeOptions(**settings), arguments.model or Path(folder)))


if __name__ == "__main__":
    main()
