"""Signs of life: each end of a link sends one every second, so that a link whose other end hangs, or is half open, is
noticed, and so that no balancer on the way takes it for idle.

Silence is counted in own heartbeats, not by the clock: a process that was suspended itself blames nobody.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any

from octavo.common.errors import LinkClosedError, UnresponsiveError
from octavo.common.links.link import Link

HEARTBEAT_S = 1.0
QUIET_BEATS = 3
"""Own heartbeats without a sign of life after which the other end is said to be quiet."""
LOST_BEATS = 15
"""And after which the link is given up."""
HEARTBEAT = b""
"""Its body, which no message has: a message names at least its kind."""


class BeatingLink(Link[Any, Any]):
    """A link over a socket. Carriers call `_begin_beats` once they can send, and `_heard` for whatever comes."""

    _beat: asyncio.TimerHandle | None = None
    _num_silent_beats = 0

    @property
    def is_quiet(self) -> bool:
        return self._num_silent_beats >= QUIET_BEATS and not self._closed

    @abstractmethod
    def _send_heartbeat(self) -> None: ...

    @abstractmethod
    def _give_up(self, error: LinkClosedError) -> None:
        """End the link without waiting for the other end."""

    def _begin_beats(self) -> None:
        self._beat = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._on_beat)

    def _heard(self) -> None:
        self._num_silent_beats = 0

    def _on_beat(self) -> None:
        if self._closed:
            return
        self._num_silent_beats += 1
        if self._num_silent_beats >= LOST_BEATS:
            self._give_up(UnresponsiveError(f"nothing has come for {LOST_BEATS * HEARTBEAT_S:g} s"))
            return
        self._send_heartbeat()
        self._begin_beats()

    def _ended(self, error: Any) -> None:
        if self._beat is not None:
            self._beat.cancel()
        super()._ended(error)
