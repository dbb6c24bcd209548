"""What a service tells probes and scrapers over HTTP: /health/live, /health/ready and /metrics."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import prometheus_client

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

LIVE_TIMEOUT_S = 2.0
"""A service whose event loop does not turn for this long is not alive."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """As the base class, without its reverse look-up of the host name, which can take seconds."""
        self.allow_reuse_address = True
        super(WSGIServer, self).server_bind()
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds: they are not worth a line."""


@contextmanager
def operations_http(
    listen: str | None, health: Callable[[], str], liveness: Callable[[], str] = lambda: ""
) -> Iterator[int | None]:
    """Serve at `listen` (HOST:PORT, port 0 takes a free one) while this is open; yields the port. None serves nothing.

    `health` returns "" when the service is ready, else the reason, and `liveness` when it needs no restart; both are
    called from another thread. To be opened on the service's event loop, which has to turn for /health/live to answer
    200. Raises OSError if the address is taken.
    """
    if listen is None:
        yield None
        return
    host, _, port = listen.rpartition(":")
    app = _app(asyncio.get_running_loop(), health, liveness)
    server = make_server(host.strip("[]") or "0.0.0.0", int(port), app, _Server, _Handler)
    thread = threading.Thread(target=server.serve_forever, name="operations-http", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _app(loop: asyncio.AbstractEventLoop, health: Callable[[], str], liveness: Callable[[], str]) -> WSGIApplication:
    metrics: WSGIApplication = prometheus_client.make_wsgi_app()

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        if path == "/health/live":
            reason = liveness() if _turns(loop) else f"the event loop has not turned for {LIVE_TIMEOUT_S:g} s"
        elif path == "/health/ready":
            reason = health()
        else:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"/metrics, /health/live or /health/ready\n"]
        state = path.rpartition("/")[2]
        body = {"status": f"not {state}", "reason": reason} if reason else {"status": state}
        status = "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return app


def _turns(loop: asyncio.AbstractEventLoop) -> bool:
    turned = threading.Event()
    try:
        loop.call_soon_threadsafe(turned.set)
    except RuntimeError:  # closed
        return False
    return turned.wait(LIVE_TIMEOUT_S)
