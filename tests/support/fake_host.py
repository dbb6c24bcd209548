"""A scheduler on links, with a worker and a KV manager that it can lose, and a gateway that listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from octavo.common.errors import OctavoError
from octavo.common.links import Address, Link, local_pair
from octavo.common.messages.generation import (
    ChoiceFinished,
    RequestFailed,
    ResumedChoice,
    SamplingParams,
    SchedulerLoad,
    SchedulerStatus,
    Submit,
    TokenBatch,
)
from octavo.common.messages.step import StepPlan, StepRefused, WorkerHello, WorkerReady
from octavo.common.runtime import Stop
from octavo.kvmanager.pool import PoolSettings
from octavo.kvmanager.server import KvManagerServer
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.server import SchedulerServer
from octavo.simulator.scripted_worker import ScriptedWorker

VOCAB, NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 97, 64, 8, 4
UNUSED = Address("local", "unused")
FIRST_EPOCH = 1000


class FakeHost:
    """Worker and KV manager that a scheduler can reach, lose and find again."""

    def __init__(self) -> None:
        self.kvmanager = KvManagerServer(PoolSettings(), boot_epoch=1, check_ledger=True)
        self.is_up = True
        self.worker_answers = True
        self.kvmanager_answers = True
        self.refuses_step: int | None = None
        self.step_s = 0.0
        self.links: dict[str, Link[Any, Any]] = {}
        self.epochs: list[int] = []
        self.least_boot_epoch = 0

    async def connect_worker(self) -> Link[Any, Any]:
        client, server = self._join("worker")
        worker = ScriptedWorker(NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS, VOCAB)
        loop = asyncio.get_running_loop()

        def on_message(message: WorkerHello | StepPlan) -> None:
            if isinstance(message, WorkerHello):
                self.epochs.append(message.epoch)
                server.send(WorkerReady(len(self.epochs), "m", NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS, 32, 256, VOCAB, ()))
            elif message.step_id == self.refuses_step:
                self.refuses_step = None
                server.send(StepRefused(message.step_id, "STALE_BLOCK", "block 3 is of an old generation"))
            elif self.worker_answers:
                loop.call_later(self.step_s, lambda: server.send(worker.run(message)))

        server.bind(on_message, ignore)
        return client

    async def connect_kvmanager(self) -> Link[Any, Any]:
        client, server = self._join("kvmanager")
        if self.kvmanager_answers:
            self.kvmanager.accept(server)
        else:
            server.bind(lambda message: None, ignore)
        return client

    def _join(self, service: str) -> tuple[Link[Any, Any], Link[Any, Any]]:
        if not self.is_up:
            raise ConnectionRefusedError(f"no {service} here")
        client: Link[Any, Any]
        client, server = local_pair()
        self.links[service] = server
        return client, server


class Gateway:
    """Keeps everything that a scheduler says to it."""

    def __init__(self, scheduler: SchedulerServer) -> None:
        self.link: Link[Any, Any]
        self.link, server = local_pair()
        self.statuses = [SchedulerStatus(False, "nothing heard yet", None)]
        self.loads: list[SchedulerLoad] = []
        self.tokens: dict[int, list[int]] = {}
        self.by_choice: dict[tuple[int, int], list[int]] = {}
        self.num_finished = 0
        self.finished: dict[int, ChoiceFinished] = {}
        self.failed: dict[int, RequestFailed] = {}
        self.is_closed = asyncio.Event()
        self.link.bind(self._on_message, lambda error: self.is_closed.set())
        scheduler.accept(server)

    def submit(
        self,
        request_no: int,
        prompt: list[int],
        max_tokens: int,
        resumed: tuple[ResumedChoice, ...] = (),
        **options: int,
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)  # type: ignore[arg-type]
        self.link.send(Submit(request_no, f"r{request_no}", tuple(prompt), params, resumed=resumed))

    def _on_message(self, message: SchedulerStatus | SchedulerLoad | TokenBatch) -> None:
        if isinstance(message, SchedulerStatus):
            self.statuses.append(message)
            return
        if isinstance(message, SchedulerLoad):
            self.loads.append(message)
            return
        for token in message.tokens:
            self.tokens.setdefault(token.request_no, []).append(token.token_id)
            self.by_choice.setdefault((token.request_no, token.choice_index), []).append(token.token_id)
        self.num_finished += len(message.finished)
        self.finished |= {end.request_no: end for end in message.finished}
        self.failed |= {failure.request_no: failure for failure in message.failed}


def ignore(error: OctavoError | None) -> None:
    """A link of the host was closed."""


@asynccontextmanager
async def running(host: FakeHost, **settings: Any) -> AsyncIterator[tuple[SchedulerServer, Gateway, Stop]]:
    config = SchedulerConfig(
        listen=[UNUSED],
        kvmanager=UNUSED,
        worker=UNUSED,
        **{"drain_grace_s": 0.0, "max_num_seqs": NUM_SLOTS, **settings},
    )
    scheduler = SchedulerServer(
        config, host.connect_kvmanager, host.connect_worker, FIRST_EPOCH, lambda: host.least_boot_epoch
    )
    stop = Stop()
    serving = asyncio.create_task(scheduler.run(stop))
    gateway = Gateway(scheduler)
    try:
        yield scheduler, gateway, stop
    finally:
        if not stop.is_requested:
            stop.request()
        await asyncio.wait_for(serving, 5)
