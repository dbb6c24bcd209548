"""Keeps one outgoing link: connects, opens, serves, and connects again when the link is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

from octavo.common.errors import LinkClosedError, OctavoError, StaleEpochError, UnresponsiveError
from octavo.common.links import Link

log = structlog.get_logger()

Sent = TypeVar("Sent")
Received = TypeVar("Received")

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 0.5


class Peer(Generic[Sent, Received]):
    """A service that this one is a client of."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[Link[Sent, Received]]],
        opening: Callable[[], Sent],
        on_opened: Callable[[Received], None],
        on_message: Callable[[Received], None],
        on_lost: Callable[[OctavoError, bool], None],
        open_timeout_s: float,
    ) -> None:
        """`opening` makes the first message of a link, whose answer goes to `on_opened`; it must come within
        `open_timeout_s`. If one of these raises an OctavoError, the link is given up. `on_lost` is told why there is
        no link, and whether what was said over it still holds.
        """
        self.name = name
        self._connect = connect
        self._opening = opening
        self._on_opened = on_opened
        self._on_message = on_message
        self._on_lost = on_lost
        self._open_timeout_s = open_timeout_s
        self._link: Link[Sent, Received] | None = None
        self._ended: asyncio.Future[tuple[OctavoError, bool]] | None = None
        self._opened = asyncio.Event()
        """The present link, or the last one, was opened."""

    @property
    def is_quiet(self) -> bool:
        """There is a link, and nothing has come over it for some seconds."""
        return self._link is not None and self._link.is_quiet

    def send(self, message: Sent) -> None:
        """Nothing is sent while the link is lost."""
        if self._link is not None:
            self._link.send(message)

    def give_up(self, error: OctavoError, *, can_resume: bool) -> None:
        """End the link, if there is one, and connect again."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result((error, can_resume))
            if self._link is not None:
                self._link.close()

    async def keep(self) -> None:
        """Run until cancelled."""
        backoff_s = _FIRST_BACKOFF_S
        try:
            while True:
                error, can_resume = await self._serve_once()
                self._close()
                self._on_lost(error, can_resume)
                backoff_s = _FIRST_BACKOFF_S if self._opened.is_set() else min(2 * backoff_s, _MAX_BACKOFF_S)
                await asyncio.sleep(backoff_s)
        finally:
            self._close()

    async def _serve_once(self) -> tuple[OctavoError, bool]:
        """One link from beginning to end: why it ended, and whether it can be resumed."""
        self._opened.clear()
        try:
            self._link = link = await self._connect()
            opening = self._opening()
        except (OSError, TimeoutError, OctavoError) as failure:
            return LinkClosedError(f"{self.name} away: {failure}"), True
        ended = self._ended = asyncio.get_running_loop().create_future()
        link.bind(self._receive, self._closed)
        link.send(opening)
        opened = asyncio.create_task(self._opened.wait())
        try:
            await asyncio.wait({opened, ended}, timeout=self._open_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            opened.cancel()
        if not self._opened.is_set() and not ended.done():
            return UnresponsiveError(f"{self.name} has not answered within {self._open_timeout_s} s"), True
        reason: tuple[OctavoError, bool] = await ended
        return reason

    def _receive(self, message: Received) -> None:
        if self._ended is None or self._ended.done():
            return
        try:
            if self._opened.is_set():
                self._on_message(message)
            else:
                self._on_opened(message)
                self._opened.set()
        except StaleEpochError as error:
            self.give_up(error, can_resume=True)  # a new life would take a higher epoch, and the pool from its owner
        except OctavoError as error:
            self.give_up(error, can_resume=False)

    def _closed(self, error: OctavoError | None) -> None:
        kind = UnresponsiveError if isinstance(error, UnresponsiveError) else LinkClosedError
        self.give_up(kind(f"{self.name} lost" + (f": {error}" if error else "")), can_resume=True)

    def _close(self) -> None:
        link, self._link, self._ended = self._link, None, None
        if link is not None:
            link.close()
