"""Reads the bodies of requests, and answers those that are too large before they have come."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.gateway.http_errors import FieldError, error_response, report_of

MAX_DROPPED_BYTES = 64 * 2**20
_DROP_TIMEOUT_S = 30.0


class BodyTooLargeError(FieldError):
    """The body has more bytes than are taken."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(None, f"the body is larger than {max_bytes} bytes", "body_too_large", status=413)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body. Raises BodyTooLargeError as soon as it is known to be longer than `max_bytes`."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLargeError(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLargeError(max_bytes)
    return bytes(body)


class EarlyAnswer(Response):
    """Answers a request whose body is still to come, and ends the connection.

    What comes is dropped for some time: a connection that is closed over unread bytes is reset, and the client may
    never see the answer.
    """

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.body, answer.status_code, dict(answer.headers) | {"connection": "close"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unended(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await super().__call__(scope, receive, send_unended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DROP_TIMEOUT_S):
                await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes <= MAX_DROPPED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


async def on_body_too_large(request: Request, error: Exception) -> Response:
    """The handler of BodyTooLargeError."""
    return EarlyAnswer(error_response(request, report_of(error)))
