"""The unary calls of the KV manager. See proto/octavo/v1/kvmanager_service.proto."""

from __future__ import annotations

from typing import Any

import grpc

from octavo.kvmanager.ledger import violations
from octavo.kvmanager.server import KvManagerServer
from octavo.v1 import kvmanager_service_pb2 as pb


class KvManagerServicer:
    """Answers for the pools of one server."""

    def __init__(self, server: KvManagerServer) -> None:
        self._server = server

    async def InspectPool(self, request: pb.InspectPoolRequest, context: Any) -> pb.InspectPoolResponse:
        """See kvmanager_service.proto. Reads every block on the event loop: 90 ms for a pool of 55,712."""
        pool = self._server.find_pool(request.pool_id)
        if pool is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no pool {request.pool_id!r} is open")
            raise AssertionError("abort raises")
        counts = pool.counts()
        return pb.InspectPoolResponse(
            pool_id=pool.pool_id,
            counts=pb.PoolCounts(
                free=counts.free,
                granted=counts.granted,
                active=counts.active,
                cached=counts.cached,
                quarantined=counts.quarantined,
                transferring=counts.transferring,
                host_free=counts.host_free,
                host_swapped=counts.host_swapped,
                host_cached=counts.host_cached,
            ),
            num_sequences=len(pool.tables),
            violations=violations(pool),
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the unary calls alone: the link layer serves the stream of the same service."""
        inspect_pool = grpc.unary_unary_rpc_method_handler(
            self.InspectPool,
            request_deserializer=pb.InspectPoolRequest.FromString,
            response_serializer=pb.InspectPoolResponse.SerializeToString,
        )
        service = pb.DESCRIPTOR.services_by_name["KvManagerService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"InspectPool": inspect_pool}),))
