"""The scheduler's end of a stream to a KV manager, over the local transport."""

from __future__ import annotations

import asyncio

from octavo.common.errors import OctavoError
from octavo.common.links import Link, local_pair
from octavo.common.messages.kv import KvManagerReply, KvManagerRequest
from octavo.kvmanager.server import KvManagerServer


class Scheduler:
    """The other end of one stream."""

    def __init__(self, server: KvManagerServer) -> None:
        link: Link[KvManagerRequest, KvManagerReply]
        link, other = local_pair()
        self.link = link
        self.replies: list[KvManagerReply] = []
        self.is_closed = False
        link.bind(self.replies.append, self._on_closed)
        server.accept(other)

    def _on_closed(self, error: OctavoError | None) -> None:
        self.is_closed = True

    async def send(self, *messages: KvManagerRequest) -> list[KvManagerReply]:
        """The replies to these messages."""
        self.replies.clear()
        for message in messages:
            self.link.send(message)
        for _ in range(4):
            await asyncio.sleep(0)
        return self.replies
