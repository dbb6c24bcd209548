"""HTTP over one connection as uvicorn reads it, with bounds on a request's head and on what comes after its answer."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 64 * 2**10
"""Of the request line and headers; one read from the socket may come on top."""
HEAD_TIMEOUT_S = 15.0
"""From the connection, or the head's first byte, to its last."""
REST_TIMEOUT_S = 15.0
"""For the rest of a body that was answered before it had come, which nobody reads."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends connections whose heads are too large (431) or come too slowly (408), or whose bodies have no end.

    `request.state.write_chunk` writes a piece of an answer past ASGI: a stream has one for every token.
    """

    _num_head_bytes = 0
    _is_in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _is_in_body = False
    _rest_timer: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None
    """The request that is being answered, or was last; those read after it wait in `pipeline`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_begins()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ends()
        self._body_ends()
        super().connection_lost(exc)
        if (answered := self._answered) is not None:
            # The base class tells the request that was read last, which may wait behind this one.
            answered.disconnected = answered.disconnected or not answered.response_complete
            answered.message_event.set()
            answered.scope["state"].pop("write_chunk", None)
        # Or this and its requests would keep each other alive.
        self.pipeline.clear()
        self.scope = self.cycle = self._answered = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["write_chunk"] = self._write_chunk
        self._head_begins()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_headers_complete(self) -> None:
        self._head_ends()
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._body_ends()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and self.cycle.response_complete:
            self._rest_timer = self.loop.call_later(REST_TIMEOUT_S, self.transport.close)

    def _write_chunk(self, chunk: bytes) -> bool:
        """Write a piece of a body without a length, whose head is sent; false if it has to wait, or nobody reads."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return True

    def _head_begins(self) -> None:
        self._head_ends()
        self._is_in_head, self._num_head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._refuse, HTTPStatus.REQUEST_TIMEOUT)

    def _head_ends(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _body_ends(self) -> None:
        self._is_in_body = False
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _refuse(self, status: HTTPStatus) -> None:
        self._head_ends()
        if self._num_head_bytes and not self.transport.is_closing():
            line = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(line.encode())
        self.transport.close()
