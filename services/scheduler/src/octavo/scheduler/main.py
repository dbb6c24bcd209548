"""Starts the scheduler: `octavo-scheduler`, configured by flags, `OCTAVO_SCHEDULER_*` or a YAML file."""

from __future__ import annotations

import gc

import prometheus_client

from octavo.common import runtime
from octavo.common.admin import AdminServicer
from octavo.common.codecs import GENERATE, KV_STEPS, WORKER_STEPS
from octavo.common.links import connect, listen
from octavo.common.operations_http import operations_http
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.metrics import SchedulerCollector
from octavo.scheduler.server import SchedulerServer
from octavo.scheduler.servicer import SchedulerServicer


async def serve(config: SchedulerConfig, stop: runtime.Stop) -> None:
    server = SchedulerServer(
        config,
        connect_kvmanager=lambda: connect(config.kvmanager, KV_STEPS, config.connect_timeout_s),
        connect_worker=lambda: connect(config.worker, WORKER_STEPS, config.connect_timeout_s),
    )
    gc.disable()  # the server collects when nothing runs
    prometheus_client.REGISTRY.register(SchedulerCollector(server.core))
    admin = AdminServicer(lambda: server.not_ready_reason)
    listener = await listen(config.listen, GENERATE, server.accept, [SchedulerServicer(server).add_to, admin.add_to])
    with operations_http(config.metrics_listen, lambda: server.not_ready_reason):
        await server.run(stop)
    await listener.close(grace_s=0.5)


def main() -> None:
    config = SchedulerConfig.from_command_line()
    runtime.run("scheduler", config, lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
