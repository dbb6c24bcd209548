"""Who may ask for what, and how much of it: API keys and limits in front of all routes."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.gateway import metrics
from octavo.gateway.api_keys import ApiKey, KeyIndex
from octavo.gateway.http_errors import RefusedError, error_response, report
from octavo.gateway.key_sources import KeyRing
from octavo.gateway.rate_limits import Limiter, limit_headers
from octavo.gateway.request_account import RequestAccount, account_of

_OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/version", "/docs", "/openapi.json", "/ui", "/ui/"})
_OPEN_FILES = (".css", ".html", ".js", ".svg")
_TENANT_PATHS = ("/v1/", "/tokenize", "/detokenize")
_MAX_METRIC_TENANTS = 100


class TenancyMiddleware:
    """Fills in `account`. Without a key ring all requests are of one tenant without limits, and may see everything.

    With one, a path needs a key, those of `_OPEN_PATHS` and the page's files excepted; a path that is not of the API
    needs an operator's, since it may tell of all tenants.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing | None, limiter: Limiter) -> None:
        self._app, self._ring, self._limiter = app, ring, limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._ring is None or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        account = account_of(scope)
        try:
            self._identify(scope, account, self._ring.index)
            if account.tenant.is_limited and scope["method"] == "POST":
                await account.enter(self._limiter)
        except RefusedError as refused:
            await error_response(Request(scope), refused.report)(scope, receive, _with_limits(send, account))
            self._count(account, self._ring, "refused")
            return
        try:
            await self._app(scope, receive, _with_limits(send, account))
        finally:
            self._count(account, self._ring, "served")
            await asyncio.shield(account.leave())

    def _identify(self, scope: Scope, account: RequestAccount, index: KeyIndex | None) -> None:
        if index is None:
            raise _refusal(503, "the API keys cannot be read", "service_unavailable_error", "service_unavailable")
        key = _find_key(scope, index)
        account.tenant_name, account.tenant = key.tenant, index.book.tenants[key.tenant]
        if not scope["path"].startswith(_TENANT_PATHS) and not account.tenant.operator:
            raise _refusal(403, "this needs a key of an operator", "invalid_request_error", "operator_only")

    def _count(self, account: RequestAccount, ring: KeyRing, outcome: str) -> None:
        """Tenants beyond the first so many share a label, so that the metrics stay few."""
        if not account.tenant_name or ring.index is None:
            return
        listed = list(ring.index.book.tenants)[:_MAX_METRIC_TENANTS]
        name = account.tenant_name if account.tenant_name in listed else "other"
        metrics.TENANT_REQUESTS.labels(name, outcome).inc()
        if account.num_prompt_tokens or account.num_output_tokens:
            metrics.TENANT_TOKENS.labels(name, "prompt").inc(account.num_prompt_tokens)
            metrics.TENANT_TOKENS.labels(name, "output").inc(account.num_output_tokens)


def _refusal(
    status: int, message: str, error_type: str, code: str | None, headers: dict[str, str] | None = None
) -> RefusedError:
    return RefusedError(report(status, message, error_type, None, code, headers))


def _find_key(scope: Scope, index: KeyIndex) -> ApiKey:
    """Raises RefusedError with status 401."""
    given = ""
    for name, value in scope["headers"]:
        text = value.decode("latin-1")
        if name == b"authorization" and text[:7].lower() == "bearer ":
            given = text[7:].strip()
        elif name == b"x-api-key":
            given = given or text.strip()
    challenge = {"www-authenticate": "Bearer"}
    if not given:
        message = "no API key was sent: give it as a header, Authorization: Bearer KEY, or x-api-key: KEY"
        raise _refusal(401, message, "invalid_request_error", None, challenge)
    key = index.find(given)
    if key is None:
        raise _refusal(401, "the API key is not known here", "invalid_request_error", "invalid_api_key", challenge)
    return key


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or (path.startswith("/ui/") and path.endswith(_OPEN_FILES))


def _with_limits(send: Send, account: RequestAccount) -> Send:
    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start" and account.standing is not None:
            headers = limit_headers(account.tenant, account.standing).items()
            message["headers"] = [*message.get("headers", ()), *((k.encode(), v.encode()) for k, v in headers)]
        await send(message)

    return send_with_limits
