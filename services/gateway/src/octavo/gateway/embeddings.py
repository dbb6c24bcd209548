"""POST /v1/embeddings: refused, in words. A decoder's hidden states are no embeddings that anyone trained as such."""

from __future__ import annotations

from fastapi import APIRouter

from octavo.gateway.http_errors import FieldError


def router() -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/embeddings")
    async def create_embedding() -> None:
        message = "this server generates text; it serves no embedding model"
        raise FieldError(None, message, "unsupported_endpoint", status=404)

    return routes
