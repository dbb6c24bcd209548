"""Reads the scheduler's metrics from its admin service."""

from __future__ import annotations

import grpc
import structlog

from octavo.v1 import admin_service_pb2 as pb
from octavo.v1 import admin_service_pb2_grpc as pb_grpc

log = structlog.get_logger()

_TIMEOUT_S = 2.0


class SchedulerAdmin:
    """One channel to the admin service at a gRPC target, opened on first use."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel: grpc.aio.Channel | None = None

    async def metrics(self) -> bytes:
        """Its exposition, or nothing if it does not answer in time."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._target)
        stub = pb_grpc.AdminServiceStub(self._channel)
        try:
            response = await stub.GetMetrics(pb.GetMetricsRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.warning("scheduler metrics not read", code=error.code().name)
            return b""
        exposition: bytes = response.exposition
        return exposition

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
