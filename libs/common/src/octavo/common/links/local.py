"""The local transport: two cores in one process, joined without encoding."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from octavo.common.links.link import Link

Client = TypeVar("Client")
Server = TypeVar("Server")


class _LocalLink(Link[Any, Any]):
    """Hands each message to its peer in the loop's next turn, so that no call is nested in another."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._peer: _LocalLink | None = None

    def send(self, message: Any) -> None:
        if not self._closed and self._peer is not None:
            self._loop.call_soon(self._peer._receive, message)

    def close(self) -> None:
        if not self._closed and self._peer is not None:
            self._loop.call_soon(self._peer._ended, None)
        self._ended(None)

    def _receive(self, message: Any) -> None:
        self._deliver(message)
        self._delivered()


def local_pair() -> tuple[Link[Client, Server], Link[Server, Client]]:
    """The client's and the server's end of a stream inside the running event loop."""
    loop = asyncio.get_running_loop()
    client, server = _LocalLink(loop), _LocalLink(loop)
    client._peer, server._peer = server, client
    return client, server
