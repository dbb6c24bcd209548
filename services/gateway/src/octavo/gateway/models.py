"""GET /v1/models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from octavo.common.errors import NotReadyError, UnknownModelError
from octavo.common.messages.generation import ModelInfo
from octavo.gateway.answer_schema import ModelEntry, ModelList
from octavo.gateway.openapi import answers
from octavo.gateway.worker_groups import WorkerGroups


def router(client: WorkerGroups) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    started = int(time.time())

    def entry(model: ModelInfo) -> dict[str, Any]:
        return {
            "id": model.model_name,
            "object": "model",
            "created": started,
            "owned_by": "octavo",
            "max_model_len": model.max_model_len,
        }

    @routes.get("/v1/models", responses=answers(ModelList))
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [entry(client.model)] if client.model is not None else []}

    @routes.get("/v1/models/{name:path}", responses=answers(ModelEntry))
    async def retrieve_model(name: str) -> dict[str, Any]:
        if client.model is None:
            raise NotReadyError(client.why_not_ready)
        if name != client.model.model_name:
            raise UnknownModelError(f"the model {name!r} does not exist; this server has {client.model.model_name!r}")
        return entry(client.model)

    return routes
