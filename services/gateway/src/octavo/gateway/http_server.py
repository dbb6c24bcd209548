"""Serves the application over HTTP, and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import structlog
import uvicorn
from fastapi import FastAPI

from octavo.common.runtime import Stop
from octavo.gateway.config import GatewayConfig
from octavo.gateway.scheduler_client import SchedulerClient

log = structlog.get_logger()

_CLOSE_TIMEOUT_S = 2
_KEEP_ALIVE_S = 75


class _Server(uvicorn.Server):
    """Leaves the signals to the service's runtime."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(app: FastAPI, client: SchedulerClient, config: GatewayConfig, stop: Stop) -> None:
    """Serve until the stop is requested, then let open answers end.

    From the stop on, readiness fails and new work gets 503. What still runs after `drain_grace_s` gets an error event.
    Raises OSError if the address is taken.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=2048,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
        )
    )
    listening = _listen(config)
    serving = asyncio.create_task(server.serve([listening]))
    log.info("gateway started", host=config.host, port=listening.getsockname()[1])
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        client.refuse_new_work("the server is shutting down")
        await client.drain(config.drain_grace_s)
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving


def _listen(config: GatewayConfig) -> socket.socket:
    """A listening socket. Bound here, since uvicorn ends the process if the address is taken."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listening = socket.create_server((config.host, config.port), family=family, backlog=2048)
    listening.setblocking(False)
    return listening
