"""The calls of the scheduler beside the stream of requests. See proto/octavo/v1/scheduler_service.proto."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from octavo.scheduler.activity import watch_activity
from octavo.scheduler.server import SchedulerServer
from octavo.v1 import scheduler_service_pb2 as pb

_WATCH_INTERVAL_MS = (100, 250, 10_000)
"""Least, default and most."""
_WRITE_TIMEOUT_S = 10.0
"""For a watcher to take one frame."""


class SchedulerServicer:
    """Answers operators."""

    def __init__(self, server: SchedulerServer) -> None:
        self._server = server

    async def ExplainRequest(self, request: pb.ExplainRequestRequest, context: Any) -> pb.ExplainRequestResponse:
        """See scheduler_service.proto."""
        explanation = self._server.explain(request.request_id, for_operator=True)
        if not explanation:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"request {request.request_id!r} is unknown or forgotten")
        return pb.ExplainRequestResponse(explanation=explanation)

    async def WatchActivity(self, request: pb.WatchActivityRequest, context: Any) -> None:
        """See scheduler_service.proto."""
        least, default, most = _WATCH_INTERVAL_MS
        interval_ms = min(max(request.interval_ms or default, least), most)
        try:
            async for frame in watch_activity(self._server.core, interval_ms / 1000):
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await context.write(frame)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"nothing was read for {_WRITE_TIMEOUT_S} s")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add these calls alone: the link layer serves the stream of the same service."""
        explain_request = grpc.unary_unary_rpc_method_handler(
            self.ExplainRequest,
            request_deserializer=pb.ExplainRequestRequest.FromString,
            response_serializer=pb.ExplainRequestResponse.SerializeToString,
        )
        service = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name
        watch = grpc.unary_stream_rpc_method_handler(
            self.WatchActivity,
            request_deserializer=pb.WatchActivityRequest.FromString,
            response_serializer=pb.ActivityFrame.SerializeToString,
        )
        handlers = {"ExplainRequest": explain_request, "WatchActivity": watch}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
