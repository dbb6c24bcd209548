"""Starts the KV manager: settings to objects to sockets."""

from __future__ import annotations

import gc
import secrets
from functools import partial

import structlog
from prometheus_client import REGISTRY

from octavo.common.admin import AdminServicer
from octavo.common.codecs.kv import KV_STEPS
from octavo.common.links import listen
from octavo.common.operations_http import operations_http
from octavo.common.runtime import Stop, run
from octavo.kvmanager.catalogue import CatalogueFolder
from octavo.kvmanager.config import KvManagerConfig
from octavo.kvmanager.metrics import KvMetrics
from octavo.kvmanager.server import KvManagerServer
from octavo.kvmanager.servicer import KvManagerServicer

log = structlog.get_logger()


async def serve(config: KvManagerConfig, stop: Stop) -> None:
    """Serve until the stop is set. Raises OSError if an address is taken."""
    catalogues = None if config.catalogue_dir is None else CatalogueFolder(config.catalogue_dir)
    server = KvManagerServer(config.pool_settings, 1 + secrets.randbits(63), config.check_ledger, catalogues)
    REGISTRY.register(KvMetrics(server))
    listener = await listen(
        config.listen,
        KV_STEPS,
        server.accept,
        [KvManagerServicer(server).add_to, AdminServicer(health=lambda: "").add_to],
    )
    log.info("service started", listen=[str(address) for address in config.listen])
    # What is alive now stays for good; the collector need not walk it between two steps.
    gc.collect()
    gc.freeze()
    with operations_http(config.metrics_listen, health=lambda: ""):
        await stop.wait()
    await listener.close(config.drain_grace_s)


def main() -> None:
    config = KvManagerConfig.from_command_line()
    run("kvmanager", config, partial(serve, config))


if __name__ == "__main__":
    main()
