"""Starts the worker: `octavo-worker`, configured by flags and `OCTAVO_WORKER_*`."""

from __future__ import annotations

import os
import sys

# libgomp reads these when torch is imported. Spinning threads would take the cores from the other services.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# oneDNN keeps a compiled kernel for every shape it has met, 1,024 by default: hundreds of MiB for prompts of all
# lengths. The shapes of decodes are few.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

import asyncio
from typing import TYPE_CHECKING, NoReturn

import structlog

from octavo.common import runtime
from octavo.common.admin import AdminServicer
from octavo.common.codecs.step import WORKER_STEPS
from octavo.common.links import listen
from octavo.common.operations_http import operations_http
from octavo.common.registry.participant import taking_part
from octavo.common.roles import Role
from octavo.common.tracing import open_tracer
from octavo.worker.compute_thread import SetProgress
from octavo.worker.config import WorkerConfig
from octavo.worker.server import WorkerServer

if TYPE_CHECKING:
    from octavo.worker.worker_core import WorkerCore

log = structlog.get_logger()


def new_server(config: WorkerConfig) -> WorkerServer:
    """The worker of these settings. It loads its model once started; torch is imported then, if at all."""

    def build(progress: SetProgress) -> WorkerCore:
        if config.simulated is not None:
            from octavo.worker.simulated.loading import load_simulated_core

            return load_simulated_core(config)
        progress("importing torch")
        from octavo.worker.loading import load_core

        return load_core(config, progress)

    return WorkerServer(build, open_tracer("worker", config))


async def serve(config: WorkerConfig, stop: runtime.Stop) -> WorkerServer:
    """Listen at once, load the model meanwhile, serve until stopped. Exits with 1 if the model cannot be loaded.

    Returns the closed server, which holds what was loaded.
    """
    async with taking_part(config, Role.WORKER, config.pool_id, config.listen) as participant:
        server = new_server(config)
        participant.tell(lambda: {"loaded": float(not server.health())})
        await participant.while_registered(lambda: _serve(config, server, stop))
    return server


async def _serve(config: WorkerConfig, server: WorkerServer, stop: runtime.Stop) -> None:
    admin = AdminServicer(server.health)
    listener = await listen(config.listen, WORKER_STEPS, server.accept, [admin.add_to], config.link_tls)
    server.start()
    stopped = asyncio.create_task(stop.wait())
    try:
        with operations_http(config.metrics_listen, server.health, lambda: server.why_restart(config.step_watchdog_s)):
            await asyncio.wait({stopped, server.loaded}, return_when=asyncio.FIRST_COMPLETED)
            if server.loaded.done() and (error := server.loaded.exception()) is not None:
                log.error("model not loaded", error=str(error), kind=type(error).__name__)
                sys.exit(1)
            await stopped
    finally:
        stopped.cancel()
        await server.close(config.drain_grace_s)
        await listener.close(config.drain_grace_s)


def main() -> None:
    config = WorkerConfig.from_command_line()
    server = runtime.run("worker", config, lambda stop: serve(config, stop))
    leave(server)


def leave(server: WorkerServer) -> NoReturn:
    """End the process with what `server` holds in place.

    To free graphs, pool and locked host memory one by one takes longer than a stop may, and threads that still wait
    for the device would break off within its library. The system takes all of it back at once.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
