"""What surrounds every request: its id, its log line, its metrics, and an answer to errors nobody expected."""

from __future__ import annotations

import re
import time
import uuid
from typing import Any

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.common.tracing import Span, Tracer
from octavo.gateway import metrics
from octavo.gateway.generation_response import CLIENT_GONE_STATUS
from octavo.gateway.http_errors import error_response, report_of
from octavo.gateway.request_account import account_of

log = structlog.get_logger()

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}\Z")
EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *(f"x-ratelimit-{fact}-{kind}" for fact in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
)
"""Headers of answers that scripts of other origins may read."""
_QUIET_PATHS = ("/health/", "/metrics", "/ui")


class RequestContextMiddleware:
    """Sets `request.state.request_id` and `received_s`; answers with `x-request-id`.

    `request.state.send_body` takes an answer's body past the layers between this one and the route. They only watch for
    an answer's start, and a stream would pay for them with every token.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer | None = None) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received_s = time.perf_counter()
        request_id = _request_id(scope)
        state = scope.setdefault("state", {})
        state["request_id"], state["received_s"] = request_id, received_s
        span = self._begin_span(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        state["send_body"] = send
        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:  # while its body was being read
            state["client_is_gone"] = True
            metrics.CLIENT_DISCONNECTS.inc()
        except Exception as error:
            log.exception("request failed", request_id=request_id)
            if status == 0:
                await error_response(Request(scope), report_of(error))(scope, receive, send_with_id)
        finally:
            state.pop("send_body", None)  # or the request would keep itself alive
        if state.get("client_is_gone"):
            status = CLIENT_GONE_STATUS
        self._record(scope, request_id, status, time.perf_counter() - received_s)
        if span is not None:
            _end_span(span, scope, request_id, status)

    def _begin_span(self, scope: Scope) -> Span | None:
        """The request's span, if traces are made; its context is in the account."""
        if self._tracer is None or scope["path"].startswith(_QUIET_PATHS):
            return None
        given = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
        span = self._tracer.start(scope["method"], given, is_server=True)
        account_of(scope).traceparent = span.traceparent
        return span

    def _record(self, scope: Scope, request_id: str, status: int, duration_s: float) -> None:
        """The access log: what was asked for, by whom, and what it cost; never a text or a key."""
        path = _route(scope)
        metrics.HTTP_REQUESTS.labels(path, str(status)).inc()
        write = log.debug if path.startswith(_QUIET_PATHS) else log.info
        account = account_of(scope)
        facts: dict[str, Any] = {"tenant": account.tenant_name} if account.tenant_name else {}
        if account.num_prompt_tokens:
            facts |= {
                "ttft_s": None if account.ttft_s is None else round(account.ttft_s, 4),
                "prompt_tokens": account.num_prompt_tokens,
                "cached_tokens": account.num_cached_tokens,
                "output_tokens": account.num_output_tokens,
            }
        write(
            "request finished",
            request_id=request_id,
            method=scope["method"],
            route=path,
            status=status,
            duration_s=round(duration_s, 4),
            **facts,
        )


def _end_span(span: Span, scope: Scope, request_id: str, status: int) -> None:
    account = account_of(scope)
    route = _route(scope)
    facts: dict[str, str | int | float] = {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status,
        "octavo.request_id": request_id,
        "octavo.tenant": account.tenant_name,
    }
    if account.num_prompt_tokens:
        facts["gen_ai.usage.input_tokens"] = account.num_prompt_tokens
        facts["gen_ai.usage.output_tokens"] = account.num_output_tokens
    if account.ttft_s is not None:
        facts["octavo.ttft_seconds"] = account.ttft_s
    span.end(facts, error=f"status {status}" if status >= 500 else "", name=f"{scope['method']} {route}")


def _route(scope: Scope) -> str:
    """The path with names in place of its parts, without how they are matched."""
    path: str = getattr(scope.get("route"), "path", "unknown")
    return path.replace(":path}", "}")


def _request_id(scope: Scope) -> str:
    """The client's x-request-id if it is short and plain, else a fresh one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.match(given := value.decode("latin-1")):
            return str(given)
    return uuid.uuid4().hex
