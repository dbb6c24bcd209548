"""GET /v1/requests/{id}/why."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from octavo.gateway.cache_salt import salt_of
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError
from octavo.gateway.request_account import account_of
from octavo.gateway.response_ids import ids_of
from octavo.gateway.worker_groups import WorkerGroups


def router(config: GatewayConfig, client: WorkerGroups) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.get("/v1/requests/{request_id:path}/why")
    async def explain_request(request: Request, request_id: str) -> Response:
        """Why a request waited, missed the prefix cache or was preempted; by its x-request-id or its answer's id."""
        salt = salt_of(config, account_of(request.scope).tenant_name, None)
        for known_as in ids_of(request_id):
            if explanation := await client.explain(known_as, salt):
                return Response(explanation, media_type="application/json")
        raise not_found(request_id)

    return routes


def not_found(request_id: str) -> FieldError:
    message = f"request {request_id!r} is unknown, or ended so long ago that it was forgotten"
    return FieldError("request_id", message, "request_not_found", status=404)
