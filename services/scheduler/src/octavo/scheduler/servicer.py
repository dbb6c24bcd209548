"""The unary calls of the scheduler. See proto/octavo/v1/scheduler_service.proto."""

from __future__ import annotations

from typing import Any

import grpc

from octavo.scheduler.server import SchedulerServer
from octavo.v1 import scheduler_service_pb2 as pb


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

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the unary calls alone: the link layer serves the stream of the same service."""
        explain_request = grpc.unary_unary_rpc_method_handler(
            self.ExplainRequest,
            request_deserializer=pb.ExplainRequestRequest.FromString,
            response_serializer=pb.ExplainRequestResponse.SerializeToString,
        )
        service = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name
        handlers = {"ExplainRequest": explain_request}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
