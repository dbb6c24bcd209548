"""Health, version and metrics."""

from __future__ import annotations

from importlib.metadata import version

import orjson
import prometheus_client
from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from octavo.gateway import metrics
from octavo.gateway.group_metrics import with_schedulers
from octavo.gateway.http_errors import RETRY_AFTER_S
from octavo.gateway.scheduler_admin import SchedulerAdmins
from octavo.gateway.worker_groups import WorkerGroups


def router(client: WorkerGroups, admins: SchedulerAdmins) -> APIRouter:
    """The routes. `admins` tell the schedulers' metrics, beside the gateway's own."""
    routes = APIRouter()

    @routes.get("/health/live")
    async def live() -> Response:
        return Response(b'{"status":"live"}', media_type="application/json")

    @routes.get("/health/ready")
    async def ready() -> Response:
        reason, states = client.why_not_ready, client.states
        # Of one group there is no more to say than of all.
        told = {state.pool_id: state.why_not_ready or "ready" for state in states}
        groups = {"groups": told} if len(told) > 1 else {}
        if not reason:
            return Response(orjson.dumps({"status": "ready", **groups}), media_type="application/json")
        body = orjson.dumps({"status": "not ready", "reason": reason, **groups})
        return Response(body, 503, {"retry-after": str(RETRY_AFTER_S)}, "application/json")

    @routes.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("octavo-gateway")}

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        exposition = with_schedulers(metrics.exposition(), await admins.metrics())
        return Response(exposition, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    return routes
