"""Shows the live view to everybody who looks: follows each group once for all who look at it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

from octavo.common.errors import QueueFullError
from octavo.common.roles import Role
from octavo.gateway.config import GatewayConfig
from octavo.gateway.group_figures import GroupFigures
from octavo.gateway.http_errors import FieldError
from octavo.gateway.live_frames import compressed, json_frame
from octavo.gateway.live_group import LiveGroup
from octavo.gateway.worker_groups import WorkerGroups

MAX_WATCHERS = 32
MAX_QUEUED_FRAMES = 64
"""For one watcher. One that reads more slowly is shown everything anew instead."""
_CLOSING_CHECK_S = 0.5
_FIGURES_INTERVAL_S = 1.0


class _Watcher:
    """Frames that one watcher has not read yet. It is behind at first, and once they are too many."""

    def __init__(self, pool_id: str) -> None:
        self.pool_id = pool_id
        self._frames: deque[bytes] = deque()
        self._has_frames = asyncio.Event()
        self.is_behind = True

    def tell(self, frames: list[bytes]) -> None:
        if self.is_behind:
            return
        self._frames.extend(frames)
        if len(self._frames) > MAX_QUEUED_FRAMES:
            self._frames.clear()
            self.is_behind = True
        self._has_frames.set()

    def restart(self, frames: list[bytes]) -> None:
        self._frames = deque(frames)
        self._has_frames.set()
        self.is_behind = False

    async def take(self, timeout_s: float) -> list[bytes]:
        """All that there is; nothing if nothing comes in time, or if it `is_behind`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_frames.wait()
        self._has_frames.clear()
        taken = list(self._frames)
        self._frames.clear()
        return taken


class LiveHub:
    """Frames of the live view (`live_frames.py`) for each watcher: everything of a group first, then what changes, and
    with them the figures of all groups. Streams end soon after the groups refuse work."""

    def __init__(self, config: GatewayConfig, groups: WorkerGroups) -> None:
        self._groups = groups
        self._tls = config.link_tls
        self._interval_ms = round(config.ui_update_interval_s * 1000)
        self._figures = b""
        self._watchers: set[_Watcher] = set()
        self._followed: dict[str, tuple[LiveGroup, asyncio.Task[None]]] = {}
        """pool |-> the group that somebody looks at"""
        self._telling: asyncio.Task[None] | None = None

    def watch(self, pool_id: str) -> AsyncIterator[bytes]:
        """A group; the first, if the name is empty. Raises FieldError if there is none of that name, and
        QueueFullError if too many watch already."""
        if pool_id and pool_id not in self._names():
            raise FieldError("pool", f"there is no group {pool_id!r}", "not_found", status=404)
        if len(self._watchers) >= MAX_WATCHERS:
            raise QueueFullError(f"{MAX_WATCHERS} watch the live view already")
        return self._frames_of(_Watcher(pool_id or self._first()))

    def _names(self) -> list[str]:
        return [state.pool_id for state in self._groups.states]

    def _first(self) -> str:
        """Empty while no group is known."""
        return next(iter(self._names()), "")

    async def _frames_of(self, watcher: _Watcher) -> AsyncIterator[bytes]:
        if len(self._watchers) >= MAX_WATCHERS:
            return  # of many who came at once it is the one too many
        self._watchers.add(watcher)
        if watcher.pool_id not in self._followed:
            self._followed[watcher.pool_id] = self._follow(watcher.pool_id)
        self._telling = self._telling or asyncio.create_task(self._tell_figures())
        try:
            while not self._groups.refuses_work:
                if watcher.is_behind:
                    watcher.restart(self._everything(watcher.pool_id))
                for frame in await watcher.take(_CLOSING_CHECK_S):
                    is_large = len(frame) > 2**16
                    yield await asyncio.to_thread(compressed, frame) if is_large else compressed(frame)
        finally:
            self._watchers.discard(watcher)
            await self._stop_unwatched()

    def _follow(self, pool_id: str) -> tuple[LiveGroup, asyncio.Task[None]]:
        def find_target(role: Role) -> str:
            """Somebody who came before any group was known sees the first."""
            return self._groups.admin_target(role, pool_id or self._first())

        known_as = pool_id if len(self._names()) > 1 else ""
        group = LiveGroup(known_as, find_target, partial(self._tell, pool_id), self._interval_ms, self._tls)
        return group, asyncio.create_task(group.run())

    def _everything(self, pool_id: str) -> list[bytes]:
        hello = json_frame({"type": "hello", "interval_ms": self._interval_ms, "pool_id": pool_id})
        figures = [self._figures] if self._figures else []
        group, _ = self._followed[pool_id]
        return [hello, *figures, *group.everything()]

    async def _stop_unwatched(self) -> None:
        watched = {watcher.pool_id for watcher in self._watchers}
        ended = [self._followed.pop(pool_id)[1] for pool_id in self._followed.keys() - watched]
        if not watched and self._telling is not None:
            ended.append(self._telling)
            self._telling, self._figures = None, b""
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    async def _tell_figures(self) -> None:
        reader = GroupFigures(self._groups, self._tls)
        try:
            while True:
                self._figures = json_frame({"type": "groups", "groups": await reader.read()})
                self._tell(None, [self._figures])
                await asyncio.sleep(_FIGURES_INTERVAL_S)
        finally:
            await reader.close()

    def _tell(self, pool_id: str | None, frames: list[bytes]) -> None:
        """Those who look at this group, or all."""
        for watcher in self._watchers:
            if pool_id is None or watcher.pool_id == pool_id:
                watcher.tell(frames)
