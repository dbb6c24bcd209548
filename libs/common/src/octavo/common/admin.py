"""The admin service that scheduler, KV manager and worker serve alike. See proto/octavo/v1/admin_service.proto."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import grpc
import prometheus_client

from octavo.v1 import admin_service_pb2 as pb
from octavo.v1 import admin_service_pb2_grpc as pb_grpc


class AdminServicer(pb_grpc.AdminServiceServicer):
    """Answers for one service. `health` returns "" when ready, else the reason."""

    def __init__(self, health: Callable[[], str]) -> None:
        self._health = health

    async def GetHealth(self, request: pb.GetHealthRequest, context: Any) -> pb.GetHealthResponse:
        """See admin_service.proto."""
        reason = self._health()
        return pb.GetHealthResponse(ready=not reason, reason=reason, version=version("octavo-common"))

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        """See admin_service.proto."""
        return pb.GetMetricsResponse(exposition=prometheus_client.generate_latest())

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_AdminServiceServicer_to_server(self, server)
