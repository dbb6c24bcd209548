"""Runs a service: event loop, signals, exit status. The same for all four."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import uvloop

from octavo.common import logs
from octavo.common.service_config import ServiceConfig
from octavo.common.tracing import TracingUnavailableError

log = structlog.get_logger()

Served = TypeVar("Served")

_MAX_FILES = 65_536
"""Open files that a service may have, if the system lets it: a gateway has one for each client."""


class Stop:
    """Set by SIGTERM or SIGINT; a second signal ends the process at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def request(self) -> None:
        if self._event.is_set():
            os._exit(130)
        self._event.set()

    @property
    def is_requested(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


def run(service: str, config: ServiceConfig, serve: Callable[[Stop], Awaitable[Served]]) -> Served:
    """Run `serve` and return what it returns; it should do so soon after the stop it is given is set.

    An OSError that `serve` raises (an address taken, say) is printed and exits with status 1.
    """
    logs.configure(service, config.log_level, config.log_format)
    _raise_file_limit()

    async def main() -> Served:
        stop = Stop()
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, stop.request)
        return await serve(stop)

    try:
        served = uvloop.run(main())
    except (OSError, TracingUnavailableError) as error:
        log.error("service stopped", error=str(error))
        sys.exit(1)
    log.info("service stopped")
    return served


def _raise_file_limit() -> None:
    """Shells give 1,024 files, and let a process take more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
