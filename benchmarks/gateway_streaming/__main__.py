"""How fast one gateway process streams, beside a bare generator under the same HTTP server.

    python -m benchmarks.gateway_streaming --model FOLDER

The gateway runs as in production, on one core. This process, on another, is its scheduler (steps of one token for each
stream, over a Unix socket) and its clients (chats with stop strings). A step goes out when the clients have the one
before the last, so each token is an event and a write of its own; a row `behind` lets more steps wait. The bare server
gets the same steps, holds its texts ready, and encodes the same chunks with orjson; `free`, it does not even wait for
steps. Rates are tokens per second of the server's CPU, which is what one core can do. Last, steps are paced and long
prompts come in, or long texts to tokenize and back: the gaps between the tokens of a stream tell whether they stall it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.gateway_streaming.load import Counts, Feed, ScriptedScheduler, StepBytes, StreamClient, chat, words_of
from octavo.common.codecs import GENERATE
from octavo.common.links import Address, listen

CHAT = "/v1/chat/completions"
FIRST_CORE = {0}
START_TIMEOUT_S = 30.0
WARM_UP_S = 0.5
SETTLE_S = 0.1
BEHIND = 16
"""Steps on their way to a gateway that has fallen behind."""
GAP_STREAMS, STEP_S = 64, 0.01
"""Streams, and time between two steps, while prompts come in."""
PROMPT_TOKENS = 30_000
TEXT_TOKENS = 120_000
"""Of a text that is tokenized, or of ids that become one."""


@dataclass(frozen=True, slots=True)
class Server:
    """A process that streams at `path`."""

    process: subprocess.Popen[bytes]
    port: int
    path: str
    feed: Feed | None

    def cpu_s(self) -> float:
        return time.clock_gettime((~self.process.pid << 3) | 2)  # Linux's clock of another process's CPU time

    async def open(
        self, body: dict[str, Any], counts: Counts, feed: Feed | None = None, path: str = ""
    ) -> StreamClient:
        client = StreamClient(path or self.path, body, counts, feed)
        await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", self.port)
        return client

    @contextlib.asynccontextmanager
    async def streams(self, num_streams: int, counts: Counts) -> AsyncIterator[list[StreamClient]]:
        """So many open streams; all of them have begun."""
        body = chat("Go on.", 1_000_000)
        clients = [await self.open(body, counts, self.feed) for _ in range(num_streams)]
        await asyncio.gather(*(client.begun for client in clients))
        if isinstance(self.feed, StepBytes):
            self.feed.clients = num_streams
        try:
            yield clients
        finally:
            if self.feed is not None:
                self.feed.halt()
            for client in clients:
                client.transport.abort()
            await asyncio.gather(*(client.ended for client in clients))
            await asyncio.sleep(SETTLE_S)


@dataclass(frozen=True, slots=True)
class Rate:
    """What one measurement gave."""

    cpu_us: float
    """CPU of the server per token."""
    tokens_per_s: float
    tokens_per_write: float


async def measure_rate(server: Server, num_streams: int, seconds: float, lead: int, text: str) -> Rate:
    """Also checks that the first stream is a part of `text`, over and over."""
    counts = Counts()
    async with server.streams(num_streams, counts) as clients:
        clients[0].is_recorded = True
        if server.feed is not None:
            server.feed.follow(counts, lead)
        await asyncio.sleep(WARM_UP_S)
        clients[0].is_recorded = False
        tokens, writes, cpu_s, start_s = counts.tokens, counts.writes, server.cpu_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        tokens, writes = counts.tokens - tokens, counts.writes - writes
        cpu_s, seconds = server.cpu_s() - cpu_s, time.perf_counter() - start_s
    received = clients[0].recorded_text()
    if not received or received not in text * (2 + len(received) // len(text)):
        raise SystemExit(f"a stream has another text than was sent: {received[:100]!r}")
    return Rate(1e6 * cpu_s / tokens, tokens / seconds, tokens / writes)


Disturbance = Callable[[], tuple[str, dict[str, Any]]]
"""Makes requests that take the gateway long: path and body."""


def disturbances(words: dict[int, str]) -> dict[str, Disturbance]:
    """By what they ask for."""
    draw, texts, ids = random.Random(1), list(words.values()), list(words)

    def text(num_tokens: int) -> str:
        return "".join(draw.choices(texts, k=num_tokens))

    return {
        f"prompts of {PROMPT_TOKENS} tokens": lambda: (CHAT, chat(text(PROMPT_TOKENS), 1)),
        f"texts of {TEXT_TOKENS} tokens to tokenize": lambda: (
            "/tokenize",
            {"prompt": text(TEXT_TOKENS), "return_token_strs": True},
        ),
        f"lists of {TEXT_TOKENS} ids to detokenize": lambda: (
            "/detokenize",
            {"tokens": draw.choices(ids, k=TEXT_TOKENS)},
        ),
    }


async def measure_gaps(gateway: Server, seconds: float, per_s: float, disturbance: Disturbance) -> dict[str, float]:
    """Gaps between the tokens of a stream while other requests come in, in ms, and how many of these were answered."""
    scheduler, counts, loop = gateway.feed, Counts(), asyncio.get_running_loop()
    assert isinstance(scheduler, ScriptedScheduler)
    others = []
    async with gateway.streams(GAP_STREAMS, counts):
        next_step_s = loop.time()
        end_s = next_step_s + seconds
        next_other_s = next_step_s if per_s else end_s
        while (now_s := loop.time()) < end_s:
            if now_s >= next_step_s:
                scheduler.step()
                next_step_s += STEP_S
            if now_s >= next_other_s:
                path, body = disturbance()
                others.append(await gateway.open(body, Counts(), path=path))
                next_other_s += 1 / per_s
            await asyncio.sleep(max(0.0, min(next_step_s, next_other_s) - loop.time()))
        num_answered = sum(other.begun.done() for other in others)
        for other in others:
            other.transport.abort()
    gaps_ms = sorted(1e3 * gap_s for gap_s in counts.gaps_s)
    quantiles = {f"p{100 * q:g}_ms": gaps_ms[int(q * (len(gaps_ms) - 1))] for q in (0.5, 0.99, 1.0)}
    return {"answered": num_answered, **quantiles}


@contextlib.asynccontextmanager
async def servers(model: Path, words: dict[int, str]) -> AsyncIterator[tuple[Server, Server, Server]]:
    """The gateway, the bare server that gets steps, and the one that waits for nothing; each on the first core."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="octavo-bench-"))
        scheduler, steps = ScriptedScheduler(words), StepBytes()
        address, steps_path = Address("frames", f"{folder}/scheduler.sock"), f"{folder}/steps.sock"
        listener = await listen([address], GENERATE, scheduler.accept)
        await asyncio.get_running_loop().create_unix_server(lambda: steps, steps_path)
        gateway_port, bare_port = free_port(), free_port()
        gateway = stack.enter_context(
            started("octavo.gateway.main", model, gateway_port, "--scheduler", str(address), "--log-level", "warning")
        )
        bare = stack.enter_context(
            started("benchmarks.gateway_streaming.bare_server", model, bare_port, "--steps", steps_path)
        )
        async with asyncio.timeout(START_TIMEOUT_S):
            await scheduler.is_connected.wait()
            await steps.is_connected.wait()
            for port in (gateway_port, bare_port):
                await accepts(port)
        yield (
            Server(gateway, gateway_port, CHAT, scheduler),
            Server(bare, bare_port, "/fed", steps),
            Server(bare, bare_port, "/free", None),
        )
        await listener.close(0)


@contextlib.contextmanager
def started(module: str, model: Path, port: int, *options: str) -> Any:
    process = subprocess.Popen([sys.executable, "-m", module, "--model", str(model), "--port", str(port), *options])
    try:
        os.sched_setaffinity(process.pid, FIRST_CORE)
        yield process
    finally:
        process.kill()
        process.wait()


async def accepts(port: int) -> None:
    """Wait until a server listens."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def median(rates: Sequence[Rate]) -> Rate:
    return Rate(*(statistics.median(values) for values in zip(*map(astuple, rates), strict=True)))


async def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    words = words_of(Tokenizer.from_file(str(arguments.model / "tokenizer.json")))
    text = "".join(words.values())
    figures: dict[str, Any] = {"rates": {}, "gaps": {}}
    table = Table(title="Tokens per second of CPU, one process", title_justify="left")
    for column in ("streams", "gateway", "bare", "ratio", "bare, free", "ratio", "gateway's us a token"):
        table.add_column(column, justify="right")
    table.add_column("by the clock: gateway / bare, tokens a write", justify="right")
    async with servers(arguments.model, words) as (gateway, bare, free):
        rows = [(str(n), n, min(n, 2)) for n in arguments.streams]
        rows += [(f"{n}, behind", n, BEHIND) for n in arguments.behind]
        for label, num_streams, lead in rows:
            found: list[list[Rate]] = [[], [], []]
            for _ in range(arguments.repeats):
                for rates, server in zip(found, (gateway, bare, free), strict=True):
                    rates.append(await measure_rate(server, num_streams, arguments.seconds, lead, text))
            ours, fed, unfed = map(median, found)
            table.add_row(
                label,
                *(f"{1e6 / ours.cpu_us:,.0f}", f"{1e6 / fed.cpu_us:,.0f}", f"{fed.cpu_us / ours.cpu_us:.2f}"),
                *(f"{1e6 / unfed.cpu_us:,.0f}", f"{unfed.cpu_us / ours.cpu_us:.2f}", f"{ours.cpu_us:.1f}"),
                f"{ours.tokens_per_s:,.0f} / {fed.tokens_per_s:,.0f}, {ours.tokens_per_write:.2f}",
            )
            figures["rates"][label] = {"gateway": asdict(ours), "bare": asdict(fed), "free": asdict(unfed)}
        console.print(table)
        for name, disturbance in disturbances(words).items() if arguments.gap_seconds else ():
            for per_s in (0.0, arguments.others_per_s):
                gaps = await measure_gaps(gateway, arguments.gap_seconds, per_s, disturbance)
                figures["gaps"][f"{per_s:g} {name} a second"] = gaps
                console.print(
                    f"{per_s:g} {name} a second ({gaps['answered']} answered): gaps of {GAP_STREAMS} streams at steps "
                    f"of {1e3 * STEP_S:g} ms are p50 {gaps['p50_ms']:.1f}, p99 {gaps['p99_ms']:.1f}, "
                    f"at most {gaps['p100_ms']:.1f} ms"
                )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with a byte-level tokenizer and a template")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 64, 500], help="streams at once")
    parser.add_argument("--behind", type=int, nargs="*", default=[64], help="streams of a gateway that is behind")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one measurement")
    parser.add_argument("--repeats", type=int, default=2, help="measurements of each kind, in turn")
    parser.add_argument("--gap-seconds", type=float, default=5.0, help="length of a measurement of gaps; 0: none")
    parser.add_argument("--others-per-s", type=float, default=4.0, help="long prompts or texts that come in meanwhile")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, os.sched_getaffinity(0) - FIRST_CORE)
    figures = uvloop.run(measure(arguments, Console()))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
