"""A gateway in front of a scripted scheduler, in a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from octavo.common.messages.generation import Submit
from support.running_gateway import running_gateway
from support.scripted_scheduler import Answer


@contextmanager
def gateway_in_thread(script: Callable[[Submit], Answer], **settings: Any) -> Iterator[str]:
    """Its URL. Stopped in order when left."""
    ports: list[int] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with running_gateway(script, **settings) as gateway:
            ports.append(gateway.port)
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, name="gateway")
    thread.start()
    try:
        assert started.wait(20) and ports, "the gateway did not start"
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
