"""HEAD: answered as GET is, without the body, which the server leaves out."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

_STREAMS = ("/ui/api/",)
"""Below these, answers have no end of their own."""


class HeadMiddleware:
    """Lets every route of GET whose answer ends take HEAD as well."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and not scope["path"].startswith(_STREAMS):
            scope = {**scope, "method": "GET"}  # a copy: by its own the server knows not to send the body
        await self._app(scope, receive, send)
