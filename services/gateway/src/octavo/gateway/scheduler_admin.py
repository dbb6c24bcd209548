"""Asks schedulers what operators may know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import structlog

from octavo.common.errors import NotReadyError
from octavo.common.links import TlsFiles, open_channel
from octavo.common.roles import Role
from octavo.v1 import admin_service_pb2 as pb
from octavo.v1 import admin_service_pb2_grpc as pb_grpc
from octavo.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

log = structlog.get_logger()

_TIMEOUT_S = 2.0


class SchedulerAdmin:
    """One channel to the admin service at a gRPC target, opened on first use."""

    def __init__(self, target: str, tls: TlsFiles | None = None) -> None:
        self._target, self._tls = target, tls
        self._channel: grpc.aio.Channel | None = None

    async def metrics(self) -> bytes:
        """Its exposition, or nothing if it does not answer in time."""
        try:
            stub = pb_grpc.AdminServiceStub(self._open_channel())
            response = await stub.GetMetrics(pb.GetMetricsRequest(), timeout=_TIMEOUT_S)
        except (OSError, grpc.aio.AioRpcError) as error:
            log.warning("scheduler metrics not read", error=_reason(error))
            await self.close()  # a new channel reads renewed certificates
            return b""
        exposition: bytes = response.exposition
        return exposition

    async def explain(self, request_id: str) -> bytes:
        """Why a request waited, with what is withheld from clients; empty if it is unknown or forgotten.

        Raises NotReadyError if the scheduler does not answer in time.
        """
        try:
            stub: Any = scheduler_service_pb2_grpc.SchedulerServiceStub(self._open_channel())
            asked = scheduler_service_pb2.ExplainRequestRequest(request_id=request_id)
            response = await stub.ExplainRequest(asked, timeout=_TIMEOUT_S)
        except (OSError, grpc.aio.AioRpcError) as error:
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND:
                return b""
            await self.close()  # a new channel reads renewed certificates
            raise NotReadyError(f"the scheduler does not answer: {_reason(error)}") from error
        explanation: bytes = response.explanation
        return explanation

    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = open_channel(self._target, Role.SCHEDULER, self._tls)
        return self._channel

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)


class SchedulerAdmins:
    """Those of all groups."""

    def __init__(self, targets: Callable[[], Mapping[str, str]], tls: TlsFiles | None = None) -> None:
        """`targets`: pool |-> gRPC target, as of now."""
        self._targets, self._tls = targets, tls
        self._admins: dict[str, SchedulerAdmin] = {}

    async def metrics(self) -> dict[str, bytes]:
        """pool |-> exposition, empty of those that do not answer in time"""
        admins = await self._current()
        told = await asyncio.gather(*(admin.metrics() for admin in admins.values()))
        return dict(zip(admins, told, strict=True))

    async def explain(self, request_ids: Sequence[str]) -> bytes:
        """See `SchedulerAdmin.explain`, of the first scheduler that knows one of these ids.

        Raises NotReadyError if none knows them and not all have answered.
        """
        admins = await self._current()
        failure = None if admins else NotReadyError("this gateway does not know where to ask: see scheduler_admin")
        for admin in admins.values():
            try:
                for request_id in request_ids:
                    if explanation := await admin.explain(request_id):
                        return explanation
            except NotReadyError as error:
                failure = error
        if failure is not None:
            raise failure
        return b""

    async def close(self) -> None:
        for admin in self._admins.values():
            await admin.close()

    async def _current(self) -> dict[str, SchedulerAdmin]:
        targets = self._targets()
        for target in self._admins.keys() - set(targets.values()):
            await self._admins.pop(target).close()
        for target in targets.values():
            if target not in self._admins:
                self._admins[target] = SchedulerAdmin(target, self._tls)
        return {pool_id: self._admins[target] for pool_id, target in targets.items()}


def _reason(error: OSError | grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)
