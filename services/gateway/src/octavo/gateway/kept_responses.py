"""DELETE /v1/completions/{id} and /v1/chat/completions/{id}: gives up what a response keeps for branches."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from octavo.gateway.cache_salt import salt_of
from octavo.gateway.config import GatewayConfig
from octavo.gateway.request_account import account_of
from octavo.gateway.response_ids import request_id_of
from octavo.gateway.worker_groups import WorkerGroups

CacheSalt = Annotated[str, Query(max_length=256, description="That of the response's request.")]


def router(config: GatewayConfig, client: WorkerGroups) -> APIRouter:
    """The routes. An id of which nothing is kept, or that has another salt, gets the same answer."""
    routes = APIRouter()

    def forget(request: Request, response_id: str, cache_salt: str) -> dict[str, Any]:
        tenant = account_of(request.scope).tenant_name
        client.forget(request_id_of(response_id), salt_of(config, tenant, cache_salt))
        return {"id": response_id, "deleted": True}

    @routes.delete("/v1/completions/{response_id:path}")
    async def delete_completion(request: Request, response_id: str, cache_salt: CacheSalt = "") -> dict[str, Any]:
        return {"object": "text_completion.deleted", **forget(request, response_id, cache_salt)}

    @routes.delete("/v1/chat/completions/{response_id:path}")
    async def delete_chat_completion(request: Request, response_id: str, cache_salt: CacheSalt = "") -> dict[str, Any]:
        return {"object": "chat.completion.deleted", **forget(request, response_id, cache_salt)}

    return routes
