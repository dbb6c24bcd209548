"""The ASGI application: routes, middleware, error handlers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from octavo.common.errors import OctavoError
from octavo.common.roles import Role
from octavo.common.tracing import open_tracer
from octavo.gateway import (
    anthropic_messages,
    chat,
    completions,
    embeddings,
    explanations,
    health,
    kept_responses,
    models,
    prefix_flush,
    reference_page,
    responses,
    tokenizer_routes,
    ui_routes,
)
from octavo.gateway.chat_preparation import ChatPreparation
from octavo.gateway.config import GatewayConfig
from octavo.gateway.grammars import GrammarChecker
from octavo.gateway.head_requests import HeadMiddleware
from octavo.gateway.http_errors import FieldError, RefusedError, error_response, report_of, report_of_status
from octavo.gateway.intake import IntakeMiddleware
from octavo.gateway.key_sources import KeyRing, key_source
from octavo.gateway.live_hub import LiveHub
from octavo.gateway.openapi import describe, errors
from octavo.gateway.operator_access import OperatorAccess
from octavo.gateway.rate_limits import Limiter, MemoryLimiter
from octavo.gateway.redis_rate_limits import RedisLimiter
from octavo.gateway.redis_response_store import RedisResponseStore
from octavo.gateway.request_context import EXPOSED_HEADERS, RequestContextMiddleware
from octavo.gateway.response_store import MemoryResponseStore, ResponseStore
from octavo.gateway.scheduler_admin import SchedulerAdmins
from octavo.gateway.tenancy import TenancyMiddleware
from octavo.gateway.tokenization import ModelTokenizer
from octavo.gateway.worker_groups import WorkerGroups


def create_app(config: GatewayConfig, client: WorkerGroups, tokenizer: ModelTokenizer) -> FastAPI:
    """The gateway as an application. Its lifespan runs the client."""
    store = _response_store(config)
    checker = GrammarChecker(config.model / "tokenizer.json", config.grammar_processes, config.grammar_timeout_s)
    admins = SchedulerAdmins(lambda: client.admin_targets(Role.SCHEDULER), config.link_tls)
    tracer = open_tracer("gateway", config)
    source = key_source(config)
    ring = KeyRing(source) if source is not None else None
    limiter: Limiter = RedisLimiter(str(config.limits_redis)) if config.limits_redis is not None else MemoryLimiter()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if ring is not None:
            await ring.reload()
        parts = [part.run() for part in (client, ring, limiter) if part is not None]
        running = [asyncio.create_task(part) for part in parts]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await store.close()
            await limiter.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            await checker.close()
            await admins.close()

    app = FastAPI(
        title="Octavo",
        version=version("octavo-gateway"),
        lifespan=lifespan,
        responses=errors(),
        docs_url=None,
        redoc_url=None,
    )
    describe(app)
    app.add_middleware(
        IntakeMiddleware, max_buffered_bytes=config.max_buffered_body_bytes, timeout_s=config.body_timeout_s
    )
    app.add_middleware(TenancyMiddleware, ring=ring, limiter=limiter)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    app.add_middleware(RequestContextMiddleware, tracer=tracer)
    app.add_middleware(HeadMiddleware)
    app.add_exception_handler(OctavoError, _on_error)
    app.add_exception_handler(FieldError, _on_error)
    app.add_exception_handler(RefusedError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_bad_parameter)
    app.include_router(completions.router(config, client, tokenizer, checker))
    chats = ChatPreparation(config, client, tokenizer, checker)
    app.include_router(chat.router(config, chats, tokenizer.pieces))
    app.include_router(responses.router(config, chats, tokenizer.pieces, store))
    app.include_router(anthropic_messages.router(config, chats))
    app.include_router(tokenizer_routes.router(config, client, tokenizer, chats))
    app.include_router(embeddings.router())
    app.include_router(kept_responses.router(config, client))
    app.include_router(prefix_flush.router(config, client))
    app.include_router(models.router(client))
    app.include_router(explanations.router(config, client))
    app.include_router(health.router(client, admins))
    app.include_router(reference_page.router(app))
    if config.ui:
        hub = LiveHub(config, client)
        access = OperatorAccess(config, asks_for_api_keys=ring is not None)
        app.include_router(ui_routes.router(admins, hub, access))
    return app


def _response_store(config: GatewayConfig) -> ResponseStore:
    url = config.response_store_redis
    if url is None:
        return MemoryResponseStore(config.response_store_bytes, config.response_ttl_s)
    return RedisResponseStore(str(url), config.response_store_bytes, config.response_ttl_s)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(request, report_of(error))


async def _on_bad_parameter(request: Request, error: Exception) -> Response:
    """A parameter in the address of a request has a value that is not accepted."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    param = str(problem["loc"][-1])
    return error_response(request, report_of(FieldError(param, f"{param}: {problem['msg']}", "invalid_value")))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    report = report_of_status(error.status_code, str(error.detail), dict(error.headers or {}))
    return error_response(request, report)
