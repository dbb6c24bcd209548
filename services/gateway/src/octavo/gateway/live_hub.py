"""Follows scheduler and KV manager while anybody looks at the live view, once for all who do."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import structlog

from octavo.common.errors import QueueFullError
from octavo.common.links import open_channel
from octavo.common.links.grpc_stream import CHANNEL_OPTIONS
from octavo.common.roles import Role
from octavo.gateway.config import GatewayConfig
from octavo.gateway.live_activity import LiveActivity
from octavo.gateway.live_frames import compressed, json_frame
from octavo.gateway.live_pool import LivePool
from octavo.v1 import kvmanager_service_pb2 as kv_pb
from octavo.v1 import kvmanager_service_pb2_grpc as kv_grpc
from octavo.v1 import scheduler_service_pb2 as scheduler_pb
from octavo.v1 import scheduler_service_pb2_grpc as scheduler_grpc

log = structlog.get_logger()

MAX_WATCHERS = 32
MAX_QUEUED_FRAMES = 64
"""For one watcher. One that reads more slowly is shown everything anew instead."""
_RETRY_S = 1.0
_CLOSING_CHECK_S = 0.5


class _Watcher:
    """Frames that one watcher has not read yet."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = deque(frames)
        self._has_frames = asyncio.Event()
        self._has_frames.set()
        self.is_behind = False

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
        self.is_behind = False

    async def take(self, timeout_s: float) -> list[bytes]:
        """All that there is; nothing if nothing comes in time, or if it `is_behind`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_frames.wait(), timeout_s)
        self._has_frames.clear()
        taken = list(self._frames)
        self._frames.clear()
        return taken


class LiveHub:
    """Frames of the live view (`live_frames.py`) for each watcher: everything first, then what changes."""

    def __init__(self, config: GatewayConfig, is_closing: Callable[[], bool]) -> None:
        """Streams end soon after `is_closing` has become true."""
        self._targets = {"scheduler": config.scheduler_admin, "kvmanager": config.kvmanager_admin}
        self._tls = config.link_tls
        self._interval_ms = round(config.ui_update_interval_s * 1000)
        self._is_closing = is_closing
        self._views: dict[str, LiveActivity | LivePool] = {"scheduler": LiveActivity(), "kvmanager": LivePool()}
        self._absences: dict[str, str] = {}
        """Service |-> why it is not shown."""
        self._watchers: set[_Watcher] = set()
        self._following: list[asyncio.Task[None]] = []

    def watch(self) -> AsyncIterator[bytes]:
        """Raises QueueFullError if too many watch already."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise QueueFullError(f"{MAX_WATCHERS} watch the live view already")
        watcher = _Watcher(self._everything())
        self._watchers.add(watcher)
        if not self._following:
            self._following = [asyncio.create_task(self._follow(service)) for service in self._targets]
        return self._frames_of(watcher)

    async def _frames_of(self, watcher: _Watcher) -> AsyncIterator[bytes]:
        try:
            while not self._is_closing():
                if watcher.is_behind:
                    watcher.restart(self._everything())
                frames = await watcher.take(_CLOSING_CHECK_S)
                for frame in frames:
                    is_large = len(frame) > 2**16
                    yield await asyncio.to_thread(compressed, frame) if is_large else compressed(frame)
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                await self._stop_following()

    def _everything(self) -> list[bytes]:
        away = [_absence(service, reason) for service, reason in self._absences.items()]
        hello = json_frame({"type": "hello", "interval_ms": self._interval_ms})
        return [hello, *away, *(frame for view in self._views.values() for frame in view.everything())]

    async def _stop_following(self) -> None:
        following, self._following = self._following, []
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        if not self._following:
            self._absences.clear()
            for view in self._views.values():
                view.forget()

    async def _follow(self, service: str) -> None:
        target = self._targets[service]
        if target is None:
            self._is_away(service, f"the gateway was not told where: OCTAVO_GATEWAY_{service.upper()}_ADMIN is unset")
            return
        while True:
            self._views[service].forget()
            try:
                async with open_channel(target, Role(service), self._tls, CHANNEL_OPTIONS) as channel:
                    async for frame in self._stream(service, channel):
                        self._absences.pop(service, None)
                        self._tell(self._views[service].take(frame))
            except grpc.aio.AioRpcError as error:
                self._is_away(service, error.details() or error.code().name)
            except OSError as error:
                self._is_away(service, str(error))
            except Exception as error:
                log.exception("live view failed", service=service)
                self._is_away(service, type(error).__name__)
            await asyncio.sleep(_RETRY_S)

    def _stream(self, service: str, channel: grpc.aio.Channel) -> Any:
        if service == "scheduler":
            scheduler: Any = scheduler_grpc.SchedulerServiceStub(channel)
            return scheduler.WatchActivity(scheduler_pb.WatchActivityRequest(interval_ms=self._interval_ms))
        kvmanager: Any = kv_grpc.KvManagerServiceStub(channel)
        return kvmanager.WatchPool(kv_pb.WatchPoolRequest(interval_ms=self._interval_ms))

    def _is_away(self, service: str, reason: str) -> None:
        if self._absences.get(service) != reason:
            self._absences[service] = reason
            self._tell([_absence(service, reason)])

    def _tell(self, frames: list[bytes]) -> None:
        for watcher in self._watchers:
            watcher.tell(frames)


def _absence(service: str, reason: str) -> bytes:
    return json_frame({"type": "away", "service": service, "reason": reason})
