"""Health, version and metrics."""

from __future__ import annotations

from importlib.metadata import version

import orjson
import prometheus_client
from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from octavo.gateway import metrics
from octavo.gateway.http_errors import RETRY_AFTER_S
from octavo.gateway.scheduler_admin import SchedulerAdmin
from octavo.gateway.scheduler_client import SchedulerClient


def router(client: SchedulerClient, admin: SchedulerAdmin | None) -> APIRouter:
    """The routes. `admin` adds the scheduler's metrics to the gateway's."""
    routes = APIRouter()

    @routes.get("/health/live")
    async def live() -> Response:
        return Response(b'{"status":"live"}', media_type="application/json")

    @routes.get("/health/ready")
    async def ready() -> Response:
        reason = client.why_not_ready
        if not reason:
            return Response(b'{"status":"ready"}', media_type="application/json")
        body = orjson.dumps({"status": "not ready", "reason": reason})
        return Response(body, 503, {"retry-after": str(RETRY_AFTER_S)}, "application/json")

    @routes.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("octavo-gateway")}

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        exposition = metrics.exposition()
        if admin is not None:
            exposition = metrics.merged(exposition, await admin.metrics())
        return Response(exposition, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return routes
