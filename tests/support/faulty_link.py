"""A proxy in front of a Unix socket whose faults change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path


class FaultyLink:
    """Passes bytes on, in order: both carriers are streams, so what the network loses comes late instead.

    A piece that is on its way when a fault begins may still arrive.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        """Where new connections lead."""
        self.delay_s = (0.0, 0.0)
        """Bounds, drawn anew for each piece."""
        self.is_away = False
        """New connections are refused."""
        self.max_idle_s: float | None = None
        """A connection on which nothing comes for so long from one end is cut, as balancers do."""
        self.num_connections = 0
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    def stall(self) -> None:
        """Half-open from now on: both ends stay connected, and nothing passes."""
        self._flows.clear()

    def heal(self) -> None:
        """What was held back passes."""
        self._flows.set()

    def cut(self) -> None:
        """Both ends hear that the connection is gone; what was held back is lost."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        """End every connection."""
        self.heal()
        self.cut()
        await asyncio.gather(*self._serving)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A new connection."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end closes."""
        if self.is_away:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self.target)
        except OSError:
            writer.transport.abort()
            return
        self.num_connections += 1
        pair = {writer, far_writer}
        self._writers |= pair
        pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers -= pair
            for pump in pumps:
                pump.cancel()
            for end in pair:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):
            while piece := await asyncio.wait_for(reader.read(2**16), self.max_idle_s):
                await asyncio.sleep(random.uniform(*self.delay_s))
                await self._flows.wait()
                writer.write(piece)
                await writer.drain()


@contextlib.asynccontextmanager
async def faulty_link(at: Path, target: Path) -> AsyncIterator[FaultyLink]:
    """Listens at `at` while it is open."""
    link = FaultyLink(target)
    server = await asyncio.start_unix_server(link.accept, at)
    try:
        yield link
    finally:
        server.close()
        await link.close()
