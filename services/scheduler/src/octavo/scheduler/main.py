"""Starts the scheduler: `octavo-scheduler`, configured by flags, `OCTAVO_SCHEDULER_*` or a YAML file."""

from __future__ import annotations

import gc
import time

import prometheus_client

from octavo.common import runtime
from octavo.common.admin import AdminServicer
from octavo.common.codecs import GENERATE, KV_STEPS, WORKER_STEPS
from octavo.common.links import Address, connect, listen
from octavo.common.operations_http import operations_http
from octavo.common.registry import Member
from octavo.common.registry.participant import Participant, taking_part
from octavo.common.roles import Role
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.metrics import SchedulerCollector
from octavo.scheduler.server import KvLink, SchedulerServer, WorkerLink
from octavo.scheduler.servicer import SchedulerServicer


async def serve(config: SchedulerConfig, stop: runtime.Stop) -> None:
    """Wait for the lease of the pool, then serve. Raises LeaseLostError if another scheduler takes it."""
    async with taking_part(config, Role.SCHEDULER, config.pool_id, config.listen) as participant:
        with operations_http(config.metrics_listen, lambda: participant.waits_for):
            epoch = await participant.take_lease(stop)
        if epoch:
            await participant.while_registered(lambda: _serve(config, participant, epoch, stop))


async def _serve(config: SchedulerConfig, participant: Participant, epoch: int, stop: runtime.Stop) -> None:
    peers = _Peers(config, participant)
    server = SchedulerServer(
        config,
        peers.connect_kvmanager,
        peers.connect_worker,
        epoch,
        lambda: peers.boot_epoch,
        peers.worker_hangs,
    )
    participant.tell(lambda: _figures(server), lambda: server.epoch)
    gc.disable()  # the server collects when nothing runs
    prometheus_client.REGISTRY.register(SchedulerCollector(server.core))
    admin = AdminServicer(lambda: server.not_ready_reason)
    unary = [SchedulerServicer(server).add_to, admin.add_to]
    listener = await listen(config.listen, GENERATE, server.accept, unary, config.link_tls)
    try:
        with operations_http(config.metrics_listen, lambda: server.not_ready_reason):
            await server.run(stop)
    finally:
        await listener.close(grace_s=0.5)


def _figures(server: SchedulerServer) -> dict[str, float]:
    load = server.core.load
    return {"waiting": load.num_waiting, "running": load.num_running, "available_blocks": load.num_available_blocks}


class _Peers:
    """Finds KV manager and worker anew for each link: where the settings say, else where the registry has them."""

    def __init__(self, config: SchedulerConfig, participant: Participant) -> None:
        self._config, self._participant = config, participant
        self.boot_epoch = 0
        """The highest of a registered KV manager of the pool."""
        self._worker_id = ""
        """Of the registered worker that was reached last."""
        self._hung_at: dict[str, float] = {}
        """worker |-> when it was last given up because it did not answer"""

    async def connect_kvmanager(self) -> KvLink:
        config, address = self._config, self._config.kvmanager
        if address is None:
            found = self._participant.find(Role.KVMANAGER, config.pool_id)
            self.boot_epoch = max(self.boot_epoch, found.epoch)
            address = Address.parse(found.address)
        return await connect(address, KV_STEPS, config.connect_timeout_s, config.link_tls)

    async def connect_worker(self) -> WorkerLink:
        """Of several the one that was reached last, which may have only been cut off; then those that are loaded. Those
        that have hung come after all others, the one that did so last at the end."""
        config = self._config
        if config.worker is not None:
            return await connect(config.worker, WORKER_STEPS, config.connect_timeout_s, config.link_tls)

        def rank(member: Member) -> tuple[float, bool, float, str]:
            hung_at = self._hung_at.get(member.member_id, 0.0)
            return hung_at, member.member_id != self._worker_id, -member.load.get("loaded", 0.0), member.member_id

        failures: list[str] = []
        for member in sorted(self._participant.find_all(Role.WORKER, config.pool_id), key=rank):
            try:
                address = Address.parse(member.address)
                link = await connect(address, WORKER_STEPS, config.connect_timeout_s, config.link_tls)
            except (OSError, TimeoutError) as error:
                failures.append(str(error) or type(error).__name__)
            else:
                self._worker_id = member.member_id
                return link
        raise OSError("; ".join(failures))

    def worker_hangs(self) -> None:
        """The worker that was reached last does not answer."""
        self._hung_at[self._worker_id] = time.monotonic()


def main() -> None:
    config = SchedulerConfig.from_command_line()
    runtime.run("scheduler", config, lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
