"""How request bodies come in: not too slowly, not too much at once, and a few in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.gateway.http_errors import RETRY_AFTER_S, RefusedError, report

_BODIES_A_TURN = 16
"""About 10 ms of work, for which tokens of other streams wait."""


class IntakeMiddleware:
    """Owns the count of bytes of bodies whose answers have not begun, and the turns of those that are complete."""

    def __init__(self, app: ASGIApp, max_buffered_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_buffered_bytes, self._timeout_s = max_buffered_bytes, timeout_s
        self._num_buffered_bytes = 0
        self._turns = Turns(_BODIES_A_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(asyncio.get_running_loop().time() + self._timeout_s)

        async def receive_in_time() -> Message:
            return await receive() if body.is_complete else await self._receive(body, receive)

        async def send_and_let_go(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._let_go(body)
            await send(message)

        try:
            await self._app(scope, receive_in_time, send_and_let_go)
        finally:
            self._let_go(body)

    async def _receive(self, body: _Body, receive: Receive) -> Message:
        """Raises RefusedError."""
        try:
            async with asyncio.timeout_at(body.deadline_s):
                message = await receive()
        except TimeoutError:
            text = f"the body has not come within {self._timeout_s:g} s"
            headers = {"connection": "close"}  # the rest is not waited for
            raise RefusedError(report(408, text, "invalid_request_error", None, "body_timeout", headers)) from None
        if message["type"] == "http.request":
            num_bytes = len(message.get("body", b""))
            body.num_bytes += num_bytes
            self._num_buffered_bytes += num_bytes
            body.is_complete = not message.get("more_body", False)
            if self._num_buffered_bytes > self._max_buffered_bytes:
                text = f"bodies of requests that are not answered yet take more than {self._max_buffered_bytes} bytes"
                headers = {"retry-after": str(RETRY_AFTER_S)}
                raise RefusedError(report(429, text, "rate_limit_error", None, "queue_full", headers))
            if body.is_complete:
                await self._turns.take()
        return message

    def _let_go(self, body: _Body) -> None:
        self._num_buffered_bytes -= body.num_bytes
        body.num_bytes = 0


class _Body:
    __slots__ = ("deadline_s", "is_complete", "num_bytes")

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.is_complete = False
        self.num_bytes = 0
        """That this body has in the count."""


class Turns:
    """Lets so many pass in each turn of the event loop, in the order in which they come.

    Of a thousand requests that come at once the first are on their way while the last are still read, and streams go
    on meanwhile.
    """

    def __init__(self, num_a_turn: int) -> None:
        self._num_a_turn = self._num_left = num_a_turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Returns in this turn if it is not full and nobody waits."""
        if self._num_left == self._num_a_turn:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        if self._num_left:
            self._num_left -= 1
            return
        passes = asyncio.get_running_loop().create_future()
        self._waiting.append(passes)
        await passes

    def _begin_turn(self) -> None:
        self._num_left = self._num_a_turn
        while self._waiting and self._num_left:
            passes = self._waiting.popleft()
            if not passes.done():  # else its request was given up
                passes.set_result(None)
                self._num_left -= 1
        if self._num_left < self._num_a_turn:
            asyncio.get_running_loop().call_soon(self._begin_turn)
