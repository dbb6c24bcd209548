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
from octavo.common.registry.participant import taking_part
from octavo.common.roles import Role
from octavo.common.runtime import Stop, run
from octavo.kvmanager.catalogue import CatalogueFolder
from octavo.kvmanager.config import KvManagerConfig
from octavo.kvmanager.metrics import KvMetrics
from octavo.kvmanager.server import KvManagerServer
from octavo.kvmanager.servicer import KvManagerServicer

log = structlog.get_logger()


async def serve(config: KvManagerConfig, stop: Stop) -> None:
    """Serve until the stop is set; with a registry, wait for the lease of the pool first.

    Raises OSError if an address is taken, or if another KV manager takes the lease.
    """
    async with taking_part(config, Role.KVMANAGER, config.pool_id, config.listen) as participant:
        with operations_http(config.metrics_listen, lambda: participant.waits_for):
            epoch = await participant.take_lease(stop)
        if epoch:
            boot_epoch = epoch if config.registry else 1 + secrets.randbits(63)
            await participant.while_registered(partial(_serve, config, boot_epoch, stop))


async def _serve(config: KvManagerConfig, boot_epoch: int, stop: Stop) -> None:
    catalogues = None if config.catalogue_dir is None else CatalogueFolder(config.catalogue_dir)
    server = KvManagerServer(config.pool_settings, boot_epoch, config.check_ledger, catalogues)
    REGISTRY.register(KvMetrics(server))
    listener = await listen(
        config.listen,
        KV_STEPS,
        server.accept,
        [KvManagerServicer(server).add_to, AdminServicer(health=lambda: "").add_to],
        config.link_tls,
    )
    log.info("service started", listen=[str(address) for address in config.listen])
    # What is alive now stays for good; the collector need not walk it between two steps.
    gc.collect()
    gc.freeze()
    try:
        with operations_http(config.metrics_listen, health=lambda: ""):
            await stop.wait()
    finally:
        await listener.close(config.drain_grace_s)


def main() -> None:
    config = KvManagerConfig.from_command_line()
    run("kvmanager", config, partial(serve, config))


if __name__ == "__main__":
    main()
