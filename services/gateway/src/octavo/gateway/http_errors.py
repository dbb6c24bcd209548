"""What clients see of errors: the one table from error class to HTTP status, and the OpenAI error body."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from octavo.common.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidGrammarError,
    InvalidRequestError,
    LinkClosedError,
    NotReadyError,
    NumericError,
    OctavoError,
    OverloadedLinkError,
    PromptTooLongError,
    ProtocolError,
    QueueFullError,
    TokenOutOfRangeError,
    UnknownModelError,
    UnknownResponseError,
)

RETRY_AFTER_S = 1


class FieldError(Exception):
    """A field of the request has a value that is not accepted."""

    def __init__(self, param: str | None, message: str, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.message, self.code, self.status = param, message, code, status


class RefusedError(Exception):
    """A request is turned away for what is not in its body: its key, its tenant's limits, the server's load."""

    def __init__(self, shown: ErrorReport) -> None:
        super().__init__(shown.status)
        self.report = shown


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """In what runs inside, a FieldError names a field by its other name; `names` that begin with a dot are of fields
    within others."""
    try:
        yield
    except FieldError as error:
        if error.param is None:
            raise
        field, rest = re.fullmatch(r"(\w*)(.*)", error.param, re.DOTALL).groups()  # type: ignore[union-attr]
        for inner, other in names.items():
            rest = rest.replace(inner, other) if inner.startswith(".") else rest
        param = names.get(field, field) + rest
        message = param + error.message.removeprefix(error.param)
        raise FieldError(param, message, error.code, error.status) from None


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one class of error looks from outside."""

    status: int
    type: str
    code: str | None = None
    is_retryable: bool = False
    """Sent with Retry-After."""
    is_final: bool = False
    """Clients are told not to try again, which they would by its status."""
    withholds_message: bool = False


_INVALID = "invalid_request_error"
_SERVER = "server_error"
_UNAVAILABLE = ErrorKind(503, "service_unavailable_error", "service_unavailable", is_retryable=True)

ERROR_KINDS: dict[type[OctavoError], ErrorKind] = {
    InvalidRequestError: ErrorKind(400, _INVALID),
    PromptTooLongError: ErrorKind(400, _INVALID, "context_length_exceeded"),
    TokenOutOfRangeError: ErrorKind(400, _INVALID, "token_out_of_range"),
    InvalidGrammarError: ErrorKind(400, _INVALID, "invalid_grammar"),
    UnknownModelError: ErrorKind(404, _INVALID, "model_not_found"),
    UnknownResponseError: ErrorKind(404, _INVALID, "response_not_found"),
    QueueFullError: ErrorKind(429, "rate_limit_error", "queue_full", is_retryable=True),
    DeadlineExceededError: ErrorKind(408, "timeout_error", "deadline_exceeded", is_final=True),
    NotReadyError: _UNAVAILABLE,
    OverloadedLinkError: _UNAVAILABLE,
    LinkClosedError: _UNAVAILABLE,
    NumericError: ErrorKind(500, _SERVER, "numeric_error"),
    ProtocolError: ErrorKind(500, _SERVER, "internal_error", withholds_message=True),
    InternalError: ErrorKind(500, _SERVER, "internal_error", withholds_message=True),
    OctavoError: ErrorKind(500, _SERVER, "internal_error", withholds_message=True),
}
"""A class that is not listed counts as its nearest listed base."""

_PARAMS: dict[type[OctavoError], str] = {UnknownModelError: "model", UnknownResponseError: "branch"}
_WITHHELD = "The server had an internal error."


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error as it goes to the client."""

    status: int
    body: dict[str, Any]
    """`{"error": {"message", "type", "param", "code"}}`"""
    headers: dict[str, str]

    def response(self) -> Response:
        return Response(orjson.dumps(self.body), self.status, self.headers, "application/json")


def report(
    status: int,
    message: str,
    error_type: str,
    param: str | None,
    code: str | None,
    headers: dict[str, str] | None = None,
) -> ErrorReport:
    """An error in the OpenAI shape."""
    body = {"error": {"message": message, "type": error_type, "param": param, "code": code}}
    return ErrorReport(status, body, headers or {})


def report_of(error: Exception) -> ErrorReport:
    """How any exception is shown. What is not ours is an internal error, its text withheld."""
    if isinstance(error, RefusedError):
        return error.report
    if isinstance(error, FieldError):
        return report(error.status, error.message, _INVALID, error.param, error.code)
    if not isinstance(error, OctavoError):
        error = InternalError(_WITHHELD)
    kind = kind_of(type(error))
    message = _WITHHELD if kind.withholds_message else error.message
    param = next((_PARAMS[base] for base in type(error).__mro__ if base in _PARAMS), None)
    headers = {"retry-after": str(RETRY_AFTER_S)} if kind.is_retryable else {}
    if kind.is_final:
        headers["x-should-retry"] = "false"
    return ErrorReport(kind.status, report(kind.status, message, kind.type, param, kind.code).body, headers)


def kind_of(error_class: type[OctavoError]) -> ErrorKind:
    """The entry of the table for a class."""
    return next(ERROR_KINDS[base] for base in error_class.__mro__ if base in ERROR_KINDS)


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    408: "timeout_error",
}
ANTHROPIC_PATHS = "/v1/messages"
"""Where errors have Anthropic's shape."""


def anthropic_error(shown: ErrorReport, request_id: str) -> dict[str, Any]:
    """The error as Anthropic's API writes it."""
    error_type = _ANTHROPIC_TYPES.get(shown.status, "api_error" if shown.status >= 500 else "invalid_request_error")
    error = {"type": error_type, "message": shown.body["error"]["message"]}
    return {"type": "error", "error": error, "request_id": request_id}


def error_response(request: Request, shown: ErrorReport) -> Response:
    """An error in the shape of the API that was asked."""
    if request.url.path.startswith(ANTHROPIC_PATHS):
        shown = ErrorReport(shown.status, anthropic_error(shown, request.state.request_id), shown.headers)
    return shown.response()


def report_of_status(status: int, detail: str, headers: dict[str, str]) -> ErrorReport:
    """What the router itself refuses: unknown paths and methods."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    error_type = _SERVER if status >= 500 else _INVALID
    return ErrorReport(status, report(status, detail, error_type, None, codes.get(status)).body, headers)
