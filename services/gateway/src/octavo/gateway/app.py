"""The ASGI application: routes, middleware, error handlers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from octavo.common.errors import OctavoError
from octavo.gateway import (
    anthropic_messages,
    chat,
    completions,
    embeddings,
    explanations,
    health,
    kept_responses,
    models,
    tokenizer_routes,
)
from octavo.gateway.chat_preparation import ChatPreparation
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError, error_response, report_of, report_of_status
from octavo.gateway.request_context import RequestContextMiddleware
from octavo.gateway.scheduler_admin import SchedulerAdmin
from octavo.gateway.scheduler_client import SchedulerClient
from octavo.gateway.tokenization import ModelTokenizer


def create_app(config: GatewayConfig, client: SchedulerClient, tokenizer: ModelTokenizer) -> FastAPI:
    """The gateway as an application. Its lifespan runs the client."""
    admin = SchedulerAdmin(config.scheduler_admin) if config.scheduler_admin else None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(client.run())
        try:
            yield
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            if admin is not None:
                await admin.close()

    app = FastAPI(title="Octavo", version=version("octavo-gateway"), lifespan=lifespan)
    app.add_middleware(RequestContextMiddleware)
    app.add_exception_handler(OctavoError, _on_error)
    app.add_exception_handler(FieldError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.include_router(completions.router(config, client, tokenizer))
    chats = ChatPreparation(config, client, tokenizer)
    app.include_router(chat.router(config, chats, tokenizer.pieces))
    app.include_router(anthropic_messages.router(config, chats))
    app.include_router(tokenizer_routes.router(config, client, tokenizer, chats))
    app.include_router(embeddings.router())
    app.include_router(kept_responses.router(config, client))
    app.include_router(models.router(client))
    app.include_router(explanations.router(client))
    app.include_router(health.router(client, admin))
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(request, report_of(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    report = report_of_status(error.status_code, str(error.detail), dict(error.headers or {}))
    return error_response(request, report)
