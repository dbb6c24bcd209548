"""Follows scheduler and KV manager of one group while anybody looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from octavo.common.links import TlsFiles, open_channel
from octavo.common.roles import Role
from octavo.gateway.live_activity import LiveActivity
from octavo.gateway.live_frames import json_frame
from octavo.gateway.live_pool import LivePool
from octavo.v1 import kvmanager_service_pb2 as kv_pb
from octavo.v1 import kvmanager_service_pb2_grpc as kv_grpc
from octavo.v1 import scheduler_service_pb2 as scheduler_pb
from octavo.v1 import scheduler_service_pb2_grpc as scheduler_grpc

log = structlog.get_logger()

_RETRY_S = 1.0


class LiveGroup:
    """What the live view shows of a group. `run` follows it until cancelled."""

    def __init__(
        self,
        pool_id: str,
        find_target: Callable[[Role], str],
        tell: Callable[[list[bytes]], None],
        interval_ms: int,
        tls: TlsFiles | None = None,
    ) -> None:
        """`pool_id`: as the KV manager knows it; empty for its only one. `find_target`: the gRPC target of a service,
        empty while it is not known. `tell` gets frames of the live view (`live_frames.py`) as things change."""
        self._pool_id = pool_id
        self._find_target = find_target
        self._tell = tell
        self._interval_ms = interval_ms
        self._tls = tls
        self._views: dict[Role, LiveActivity | LivePool] = {Role.SCHEDULER: LiveActivity(), Role.KVMANAGER: LivePool()}
        self._absences: dict[Role, str] = {}
        """Why a service is not shown."""

    async def run(self) -> None:
        await asyncio.gather(*(self._follow(service) for service in self._views))

    def everything(self) -> list[bytes]:
        """Frames for one that knows nothing."""
        away = [_absence(service, reason) for service, reason in self._absences.items()]
        return [*away, *(frame for view in self._views.values() for frame in view.everything())]

    async def _follow(self, service: Role) -> None:
        while True:
            self._views[service].forget()
            try:
                if target := self._find_target(service):
                    await self._follow_at(service, target)
                else:
                    self._is_away(service, f"its address is unknown: see OCTAVO_GATEWAY_{service.upper()}_ADMIN")
            except grpc.aio.AioRpcError as error:
                self._is_away(service, error.details() or error.code().name)
            except OSError as error:
                self._is_away(service, str(error))
            except Exception as error:
                log.exception("live view failed", service=service)
                self._is_away(service, type(error).__name__)
            await asyncio.sleep(_RETRY_S)

    async def _follow_at(self, service: Role, target: str) -> None:
        async with open_channel(target, service, self._tls) as channel:
            async for frame in self._stream(service, channel):
                self._absences.pop(service, None)
                self._tell(self._views[service].take(frame))

    def _stream(self, service: Role, channel: grpc.aio.Channel) -> Any:
        if service is Role.SCHEDULER:
            scheduler: Any = scheduler_grpc.SchedulerServiceStub(channel)
            return scheduler.WatchActivity(scheduler_pb.WatchActivityRequest(interval_ms=self._interval_ms))
        kvmanager: Any = kv_grpc.KvManagerServiceStub(channel)
        asked = kv_pb.WatchPoolRequest(pool_id=self._pool_id, interval_ms=self._interval_ms)
        return kvmanager.WatchPool(asked)

    def _is_away(self, service: Role, reason: str) -> None:
        if self._absences.get(service) != reason:
            self._absences[service] = reason
            self._tell([_absence(service, reason)])


def _absence(service: Role, reason: str) -> bytes:
    return json_frame({"type": "away", "service": service.value, "reason": reason})
