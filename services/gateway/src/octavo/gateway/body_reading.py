"""Reads the bodies of requests."""

from __future__ import annotations

from starlette.requests import Request

from octavo.gateway.http_errors import FieldError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body. Raises FieldError with status 413 as soon as it is known to be longer than `max_bytes`.

    What still comes of it is dropped by the protocol.
    """
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> FieldError:
    return FieldError(None, f"the body is larger than {max_bytes} bytes", "body_too_large", status=413)
