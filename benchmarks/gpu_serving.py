"""Measures the whole of Octavo on a GPU: HTTP in, four processes, streamed tokens out.

    python benchmarks/gpu_serving.py [L1 L64 W1 W2 W3 RATE8 RATE16 RATE32] [--figures FILE]

The model has the shape of Llama-3.1-8B and random weights; prompts are token ids. L1 to W3 are all sent at time 0;
RATEn sends requests of W1's kind as a Poisson process of n per second for about 10 seconds. S256 are 256 requests of
one length: its TPOT is that of steady decode. Of eight requests of each it is asked how long the scheduler had them
before their first token, and they are compared with the torch backend afterwards (gpu_check.py). All but RATEn are
held against what bounds them at the rates measured before (gpu_limits.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import gpu_check
import gpu_limits
import numpy as np
import uvloop
import workloads
from gpu_timing import Limits
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from workloads import WORKLOADS, Workload

from octavo.cli.console import Screen
from octavo.cli.models import PreparedModel
from octavo.cli.serve import serve_processes
from octavo.cli.serve_options import ServeOptions

PORT = 8123
RATE_SECONDS = 10
START_TIMEOUT_S = 180
SLO_TTFT_S, SLO_TPOT_S = 1.0, 0.050


@dataclass
class Answer:
    """Times in seconds from the request's start."""

    num_tokens: int
    ttft_s: float
    total_s: float
    body: bytes
    """Of an answer that is to be checked, with its head."""

    @property
    def token_ids(self) -> list[int]:
        token_ids: list[int] = []
        for line in self.body.split(b"\n"):
            if line.startswith(b'data: {"'):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    token_ids += choice.get("token_ids") or []
        return token_ids

    @property
    def response_id(self) -> str:
        return str(json.loads(self.body.split(b"data: ", 1)[1].split(b"\n", 1)[0])["id"])

    @property
    def tpot_s(self) -> float:
        return (self.total_s - self.ttft_s) / max(1, self.num_tokens - 1)


def save_model(folder: Path) -> None:
    """A config.json and a tokenizer of the right size."""
    (folder / "config.json").write_text(json.dumps(workloads.LLAMA_8B), encoding="utf-8")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"\u0120w{index}" for index in range(len(alphabet), workloads.LLAMA_8B["vocab_size"]))]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def completion(prompt: list[int], num_output: int, *, is_checked: bool) -> bytes:
    """A request for a streamed completion."""
    body = json.dumps(
        {
            "model": "llama-8b-shape",
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": is_checked,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"Connection: close\r\n\r\n" + body


async def complete(request: bytes, num_output: int, *, is_checked: bool) -> Answer:
    """Send it over a connection of its own and read the answer. Raises SystemExit if it goes wrong."""
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT, limit=2**20)
    writer.write(request)
    first_at = last_at = 0.0
    tail = whole = b""
    while received := await reader.read(2**16):
        tail = tail[-2000:] + received
        if is_checked:
            whole += received
        if b'"choices":[{' in received:
            last_at = time.perf_counter()
            first_at = first_at or last_at
    writer.close()
    if b"data: [DONE]" not in tail or f'"completion_tokens":{num_output}' not in tail.decode(errors="replace"):
        raise SystemExit(f"a request failed: {tail[-600:]!r}")
    return Answer(num_output, first_at - started, last_at - started, whole)


async def scheduler_ttft_s(response_id: str) -> float:
    """From the request's arrival at the scheduler to its first token there."""
    answer = (await get(f"/v1/requests/{response_id}/why")).partition(b"\r\n\r\n")[2]
    return float(json.loads(answer)["prompts"][0]["first_token_s"])


async def get(path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def send(workload: Workload, rate: float | None) -> tuple[list[Answer], float]:
    """All answers, and the seconds from the first request to the last token."""
    delays = np.zeros(len(workload))
    if rate is not None:
        delays = np.cumsum(np.random.default_rng(3).exponential(1 / rate, len(workload)))

    checked = set(gpu_check.chosen(len(workload)))
    requests = [completion(*request, is_checked=index in checked) for index, request in enumerate(workload)]

    async def one(index: int, delay: float, num_output: int) -> Answer:
        if delay:
            await asyncio.sleep(delay)
        return await complete(requests[index], num_output, is_checked=index in checked)

    started = time.perf_counter()
    answers = await asyncio.gather(
        *(one(index, float(delays[index]), num_output) for index, (_, num_output) in enumerate(workload))
    )
    return answers, time.perf_counter() - started


async def measure(
    names: list[str], server: subprocess.Popen[bytes], limits: Limits, figures: Path | None
) -> dict[str, list[dict[str, list[int]]]]:
    """Send and report the workloads. Returns the requests that are to be checked of each."""
    await wait_until_ready(server)
    await send(workloads.equal_lengths(8, prompt=300, output=20, seed=77), None)
    checked: dict[str, list[dict[str, list[int]]]] = {}
    rate: float | None
    for name in names:
        if name.startswith("RATE"):
            rate = float(name.removeprefix("RATE"))
            requests = workloads.chat_like(seed=11)[: int(rate * RATE_SECONDS)]
        else:
            rate, requests = None, WORKLOADS[name]()
        answers, seconds = await send(requests, rate)
        report(name, answers, seconds)
        if rate is None:
            tpot_ms = 1000 * statistics.median(answer.tpot_s for answer in answers)
            rate_reached = sum(answer.num_tokens for answer in answers) / seconds
            figure = gpu_limits.figure_of(name, tpot_ms, rate_reached, requests, limits)
            print(f"       {figure}", flush=True)
            figure.append_to(figures)
        chosen = gpu_check.chosen(len(requests))
        inside_s = [await scheduler_ttft_s(answers[index].response_id) for index in chosen]
        outside_s = [answers[index].ttft_s - inside for index, inside in zip(chosen, inside_s, strict=True)]
        print(
            f"       of TTFT p50 {1000 * statistics.median(inside_s):.1f} ms from the scheduler on, "
            f"{1000 * statistics.median(outside_s):.1f} ms before and after it",
            flush=True,
        )
        checked[name] = []
        for index in chosen:
            prompt, num_output = requests[index]
            output = answers[index].token_ids
            assert len(output) == num_output, f"{len(output)} token ids came of {num_output}"
            checked[name].append({"prompt": prompt, "output": output})
    return checked


async def wait_until_ready(server: subprocess.Popen[bytes]) -> None:
    started = time.perf_counter()
    while time.perf_counter() - started < START_TIMEOUT_S and server.poll() is None:
        try:
            status = (await get("/health/ready")).partition(b"\r\n")[0]
            if b" 200 " in status:
                print(f"ready after {time.perf_counter() - started:.1f} s", flush=True)
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the server did not become ready")


def report(name: str, answers: list[Answer], seconds: float) -> None:
    num_tokens = sum(answer.num_tokens for answer in answers)
    ttft_ms = [1000 * answer.ttft_s for answer in answers]
    tpot_ms = [1000 * answer.tpot_s for answer in answers if answer.num_tokens > 1]
    good = sum(answer.ttft_s < SLO_TTFT_S and answer.tpot_s < SLO_TPOT_S for answer in answers)
    print(
        f"{name:6} {seconds:7.2f} s  {num_tokens / seconds:9.0f} output tokens/s  "
        f"TTFT p50 {statistics.median(ttft_ms):7.1f} p99 {np.percentile(ttft_ms, 99):7.1f} ms  "
        f"TPOT p50 {statistics.median(tpot_ms):6.2f} p99 {np.percentile(tpot_ms, 99):6.2f} ms  "
        f"within SLO {100 * good / len(answers):.0f} %",
        flush=True,
    )


def serve(folder: Path) -> int:
    os.environ.setdefault("OCTAVO_WORKER_LOAD_FORMAT", "dummy")
    options = ServeOptions(port=PORT, max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=20480)
    return serve_processes(options, PreparedModel(folder, "llama-8b-shape"), Screen(Console(stderr=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*WORKLOADS, "RATE8", "RATE16", "RATE32"], metavar="NAME")
    parser.add_argument("--serve", type=Path, help="only serve the model in this folder")
    parser.add_argument("--no-check", action="store_true", help="without the comparison with torch")
    parser.add_argument("--figures", type=Path, help="file to append what gpu_figures.py reads")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        raise SystemExit(serve(arguments.serve))
    limits = gpu_limits.measure_elsewhere()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        server = subprocess.Popen([sys.executable, __file__, "--serve", folder])
        try:
            checked = uvloop.run(measure(arguments.names, server, limits, arguments.figures))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(20)
        if not arguments.no_check:
            answers = Path(folder) / "answers.json"
            answers.write_text(json.dumps(checked), encoding="utf-8")
            sys.exit(subprocess.run([sys.executable, gpu_check.__file__, str(answers), folder]).returncode)


if __name__ == "__main__":
    main()
