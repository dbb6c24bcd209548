"""What the gateway is held against: an async generator of ready chunks under the same HTTP server.

At `/fed` a stream gets a text through a queue at each step, and steps are bytes on a Unix socket; at `/free` it waits
for nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import uvicorn
import uvloop
from tokenizers import Tokenizer

from benchmarks.gateway_streaming.load import words_of
from octavo.common.links import Address
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_server import uvicorn_config


class BareServer(asyncio.Protocol):
    """The application, and the receiver of steps."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._queues: set[asyncio.Queue[None]] = set()

    def data_received(self, data: bytes) -> None:
        for _ in data:
            for queue in self._queues:
                queue.put_nowait(None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        answer = asyncio.create_task(self._answer(scope["path"] == "/fed", send))
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    async def _answer(self, is_fed: bool, send: Any) -> None:
        queue: asyncio.Queue[None] = asyncio.Queue()
        if is_fed:
            self._queues.add(queue)
        try:
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in self._events(queue if is_fed else None):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            self._queues.discard(queue)

    async def _events(self, queue: asyncio.Queue[None] | None) -> AsyncIterator[bytes]:
        envelope = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": "bench"}
        envelope["object"] = "chat.completion.chunk"
        for text in itertools.cycle(self._texts):
            await (asyncio.sleep(0) if queue is None else queue.get())
            choice = {
                "index": 0,
                "delta": {"content": text},
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
            }
            yield b"data: " + orjson.dumps({**envelope, "choices": [choice]}) + b"\n\n"


async def serve(model: Path, port: int, steps: str) -> None:
    app = BareServer(list(words_of(Tokenizer.from_file(str(model / "tokenizer.json"))).values()))
    await asyncio.get_running_loop().create_unix_connection(lambda: app, steps)
    config = uvicorn_config(app, GatewayConfig(model=model, scheduler=Address("frames", steps)))
    config.port = port
    await uvicorn.Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--steps", required=True, help="path of the socket that steps come from")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.model, arguments.port, arguments.steps))


if __name__ == "__main__":
    main()
