"""Serves the application over HTTP, and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from octavo.common.runtime import Stop
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_protocol import BoundedHttpProtocol
from octavo.gateway.worker_groups import WorkerGroups

log = structlog.get_logger()

_CLOSE_TIMEOUT_S = 2
_KEEP_ALIVE_S = 75
_FAREWELL = "the server is shutting down"


class _Server(uvicorn.Server):
    """Leaves the signals to the service's runtime."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen_http(config: GatewayConfig) -> socket.socket:
    """The listening socket, bound before anything starts. Raises OSError if the address is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.create_server(
        (config.host, config.port), family=family, backlog=2048, reuse_port=config.reuse_port
    )
    listening.setblocking(False)
    # Connections inherit these: what is written goes out at once, and who takes nothing of it is cut by the kernel.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(config.stalled_client_timeout_s * 1000))
    return listening


def uvicorn_config(app: ASGIApp, config: GatewayConfig) -> uvicorn.Config:
    """How the server runs an application."""
    return uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=2048,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        ssl_ca_certs=str(config.tls_client_ca) if config.tls_client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca else ssl.CERT_NONE,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )


async def serve_http(
    app: FastAPI, config: GatewayConfig, client: WorkerGroups, listening: socket.socket, stop: Stop
) -> None:
    """Serve until the stop is requested, then let open answers end.

    From the stop on, readiness fails; after `drain_delay_s` new work gets 503. What still runs after the grace gets an
    error event.
    """
    server = _Server(uvicorn_config(app, config))
    serving = asyncio.create_task(server.serve([listening]))
    host, port = listening.getsockname()[:2]
    log.info("gateway started", host=host, port=port)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            client.say_farewell(_FAREWELL)
            await asyncio.sleep(config.drain_delay_s)
        client.refuse_new_work(_FAREWELL)
        await client.drain(config.drain_grace_s)
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving
