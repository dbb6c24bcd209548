"""Whether clients that read slowly, or nothing, slow down those that read: `python -m benchmarks.slow_readers`.

    python -m benchmarks.slow_readers --model FOLDER

`octavo serve` with a simulated worker streams to 20 clients that read all that comes, for some seconds: alone, beside
20 more of the same, and beside 20 slow ones, of which every other reads nothing and the rest a byte a second. What
those 20 get is printed: tokens per second of all of them, and the gaps between the pieces of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from chaos.system import MODEL_NAME, System

NUM_CLIENTS = 20
PROMPT = list(range(3, 67))
OPTIONS = ["--simulated", "h200-llama-8b", "--max-num-seqs", "64"]
WARM_UP_S = 1.0


class Client:
    """One stream after another, over raw sockets, so that how it reads is up to us."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self._at = (urlsplit(url).hostname, urlsplit(url).port)
        body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        self._request = head.encode() + content
        self.num_pieces = 0
        self.gaps_s: list[float] = []

    @asynccontextmanager
    async def _asking(self, receive_bytes: int | None = None) -> AsyncIterator[socket.socket]:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            if receive_bytes is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            await loop.sock_connect(connection, self._at)
            await loop.sock_sendall(connection, self._request)
            yield connection

    async def read(self) -> None:
        """Until cancelled. A piece is what one read brings; each token is an event of its own."""
        loop = asyncio.get_running_loop()
        while True:
            async with self._asking() as connection:
                last_at, tail = None, b""
                while not tail.endswith(b"0\r\n\r\n"):
                    piece = await loop.sock_recv(connection, 2**16)
                    if not piece:
                        raise SystemExit("the gateway ended a stream of a client that reads")
                    now, tail = time.perf_counter(), (tail + piece)[-16:]
                    self.num_pieces += piece.count(b"data: {")
                    if last_at is not None:
                        self.gaps_s.append(now - last_at)
                    last_at = now

    async def read_slowly(self, pause_s: float | None) -> None:
        """A byte every `pause_s`, or nothing, until cancelled."""
        loop = asyncio.get_running_loop()
        async with self._asking(receive_bytes=4096) as connection:
            while pause_s is not None:
                await asyncio.sleep(pause_s)
                await loop.sock_recv(connection, 1)
            await asyncio.Event().wait()


async def measure(url: str, max_tokens: int, seconds: float, *, num_more: int, num_slow: int) -> str:
    """A row of the table."""
    readers = [Client(url, max_tokens) for _ in range(NUM_CLIENTS + num_more)]
    tasks = [asyncio.create_task(reader.read()) for reader in readers]
    slow = [Client(url, max_tokens) for _ in range(num_slow)]
    tasks += [asyncio.create_task(client.read_slowly(1.0 if at % 2 else None)) for at, client in enumerate(slow)]
    await asyncio.sleep(WARM_UP_S)
    watched = readers[:NUM_CLIENTS]
    for reader in watched:
        reader.num_pieces, reader.gaps_s = 0, []
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    elapsed_s = time.perf_counter() - began
    rate = sum(reader.num_pieces for reader in watched) / elapsed_s
    gaps_ms = np.quantile([gap for reader in watched for gap in reader.gaps_s], (0.5, 0.99)) * 1e3
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    beside = f"{num_more} that read" if num_more else f"{num_slow} slow" if num_slow else "nobody"
    return f"| {beside} | {rate:.0f} | {gaps_ms[0]:.1f} | {gaps_ms[1]:.1f} |"


async def run(system: System, max_tokens: int, seconds: float) -> None:
    await system.wait_until_ready()
    print("| beside | tokens/s | gap p50 ms | p99 ms |\n| --- | ---: | ---: | ---: |")
    for num_more, num_slow in ((0, 0), (NUM_CLIENTS, 0), (0, NUM_CLIENTS), (0, 0)):
        print(await measure(system.url, max_tokens, seconds, num_more=num_more, num_slow=num_slow), flush=True)
        await system.wait_until_clean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="folder with a tokenizer; default: the one that `octavo serve` takes"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--max-tokens", type=int, default=4000, help="of each stream")
    arguments = parser.parse_args()
    model = arguments.model
    if model is None:
        command = [sys.executable, "-m", "octavo.cli.main", "model", "path"]
        model = Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    os.environ["OCTAVO_GATEWAY_STALLED_CLIENT_TIMEOUT_S"] = "3600"  # who reads nothing stays for all of it
    with System(model, OPTIONS, check_ledger=False) as system:
        asyncio.run(run(system, arguments.max_tokens, arguments.seconds))


if __name__ == "__main__":
    main()
