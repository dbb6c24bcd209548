"""Puts the scheduler core on links: gateways on one side, the KV manager and the worker on the other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from octavo.common.errors import (
    LinkClosedError,
    NotReadyError,
    OctavoError,
    ProtocolError,
    StaleEpochError,
    UnresponsiveError,
    from_reason,
)
from octavo.common.links import Link
from octavo.common.messages.generation import (
    Abort,
    Explain,
    Explained,
    Forget,
    GatewayMessage,
    ModelInfo,
    SchedulerLoad,
    SchedulerMessage,
    SchedulerStatus,
    Submit,
)
from octavo.common.messages.kv import KvManagerReply, KvManagerRequest, PoolOpened, StreamRefused
from octavo.common.messages.step import (
    StepRefused,
    WorkerReady,
    WorkerReply,
    WorkerRequest,
)
from octavo.common.runtime import Stop
from octavo.common.tracing import open_tracer
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.core import SchedulerCore
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.peer import Peer
from octavo.scheduler.preemption import PreemptionSettings
from octavo.scheduler.readiness import Readiness
from octavo.scheduler.request_explanation import explain
from octavo.scheduler.request_spans import RequestSpans
from octavo.scheduler.worker_group import WorkerGroup

log = structlog.get_logger()

KvLink = Link[KvManagerRequest, KvManagerReply]
WorkerLink = Link[WorkerRequest, WorkerReply]
GatewayLink = Link[SchedulerMessage, GatewayMessage]

_WATCH_INTERVAL_S = 0.5
_SUSPENDED_S = 5.0
"""A turn of the watch that took so long: this process was suspended."""
_COLLECTION_INTERVAL_S = 10.0
_LATEST_COLLECTION_S = 600.0
"""After so long the collector runs even while requests do."""


class SchedulerServer:
    """Drives one worker group. `run` connects, serves, and connects again each link that is lost."""

    def __init__(
        self,
        config: SchedulerConfig,
        connect_kvmanager: Callable[[], Awaitable[KvLink]],
        connect_worker: Callable[[], Awaitable[WorkerLink]],
        first_epoch: int | None = None,
        least_boot_epoch: Callable[[], int] = int,
        on_worker_hangs: Callable[[], None] = lambda: None,
    ) -> None:
        """`first_epoch`: fencing number of this process; None takes the milliseconds since 1970.

        A KV manager whose boot epoch is below `least_boot_epoch` has been replaced, and is refused.
        `on_worker_hangs` is called before `connect_worker` if the last worker was given up because it did not answer.
        """
        self.core = SchedulerCore(
            CoreSettings(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_waiting=config.max_num_waiting,
                max_num_choices=config.max_num_choices,
                max_num_kept=config.max_num_kept,
                pipeline_depth=config.pipeline_depth,
                prefix_cache=config.prefix_cache,
                credits_per_sequence=config.credits_per_sequence,
                reservation=config.reservation,
                preemption=PreemptionSettings(config.preemption, config.min_progress, config.swap_timeout_s),
                single_flight_timeout_s=config.single_flight_timeout_s,
                min_shared_blocks=config.min_shared_blocks,
                num_explained_requests=config.num_explained_requests,
            )
        )
        tracer = open_tracer("scheduler", config)
        self._spans = RequestSpans(tracer) if tracer is not None else None
        if self._spans is not None:
            self.core.log.on_ended = self._spans.end
        self._config = config
        self._first_epoch = first_epoch or int(time.time() * 1000)
        self._least_boot_epoch = least_boot_epoch
        self._on_worker_hangs = on_worker_hangs
        epochs = itertools.count(self._first_epoch)
        self._group = WorkerGroup(self.core, config.pool_id, epochs, self._model_of)
        self._connect_kvmanager = connect_kvmanager
        self._worker: Peer[WorkerRequest, WorkerReply] = Peer(
            "worker",
            connect_worker,
            self._group.hello,
            self._on_worker_opened,
            self._on_worker_message,
            self._on_worker_lost,
            config.load_timeout_s,
        )
        self._kvmanager: Peer[KvManagerRequest, KvManagerReply] = Peer(
            "KV manager",
            self._connect_kv,
            self._group.opening,
            self._on_pool_opened,
            self._on_kv_message,
            self._on_kv_lost,
            config.kvmanager_timeout_s,
        )
        self._has_worker_life = asyncio.Event()
        """There is a worker whose blocks the KV manager could keep."""
        self._readiness = Readiness([self._worker, self._kvmanager], time.monotonic())
        self._gateways: dict[int, GatewayLink] = {}
        self._gateway_ids = itertools.count(1)
        self._is_draining = False
        self._status = self._status_now()
        self._load = SchedulerLoad()
        """As told last."""
        self._kv_asked_at: float | None = None
        self._collected_at = time.monotonic()
        self._idle = asyncio.Event()
        """No request is alive."""

    @property
    def epoch(self) -> int:
        """The highest that this process has used."""
        return max(self._first_epoch, self._group.epoch)

    @property
    def not_ready_reason(self) -> str:
        """Empty when requests are served."""
        return self._status.reason

    # Gateways.

    def accept(self, link: GatewayLink) -> None:
        """Serve one gateway's stream."""
        gateway_id = next(self._gateway_ids)
        self._gateways[gateway_id] = link
        link.send(self._status)
        link.send(self._load)
        link.bind(
            lambda message: self._on_gateway_message(gateway_id, message),
            lambda error: self._on_gateway_closed(gateway_id, error),
        )

    def _on_gateway_message(self, gateway_id: int, message: GatewayMessage) -> None:
        match message:
            case Submit():
                self.core.on_submit(gateway_id, self._spans.begin(message) if self._spans is not None else message)
            case Abort():
                self.core.on_abort(gateway_id, message)
            case Forget():
                self.core.on_forget(message)
            case Explain():
                explanation = self.explain(message.request_id, message.salt_head, for_operator=False)
                self._gateways[gateway_id].send(Explained(message.query_no, explanation))
                return
        self._advance()

    def explain(self, request_id: str, salt_head: bytes = b"", *, for_operator: bool) -> bytes:
        """What happened to a request, as JSON; empty if it is unknown, forgotten, or of another tenant.

        See docs/api.md.
        """
        records = [record for record in self.core.log.find(request_id) if record.salt.startswith(salt_head)]
        if not records:
            return b""
        explanation = explain(request_id, records, time.monotonic(), time.time(), for_operator=for_operator)
        return json.dumps(explanation).encode()

    def _on_gateway_closed(self, gateway_id: int, error: OctavoError | None) -> None:
        if error is not None:
            log.warning("gateway lost", gateway_id=gateway_id, error=str(error))
        self._gateways.pop(gateway_id, None)
        self.core.on_gateway_lost(gateway_id)
        self._advance()

    def _tell_status(self) -> None:
        status = self._status_now()
        if status == self._status:
            return
        self._status = status
        for link in self._gateways.values():
            link.send(self._status)

    def _status_now(self) -> SchedulerStatus:
        if self._is_draining:
            reason = "shutting down"
        else:
            reason = self._readiness.why_not(time.monotonic(), self.core.oldest_step)
        pool_id, epoch = self._config.pool_id, self._first_epoch
        return SchedulerStatus(not reason, reason, self.core.model, self._is_draining, pool_id, epoch)

    def _tell_load(self) -> None:
        load = self.core.load
        if load != self._load:
            self._load = load
            for link in self._gateways.values():
                link.send(load)

    # The step path.

    def _advance(self) -> None:
        """Send what the core has to say: steps first, since only they are on the GPU's path."""
        now = time.monotonic()
        outbox = self._group.advance(now)
        for plan in outbox.plans:
            self._worker.send(plan)
        for message in outbox.kv_messages:
            self._kvmanager.send(message)
        if outbox.kv_messages and self._kv_asked_at is None:
            self._kv_asked_at = now
        if self.core.num_requests:
            self._idle.clear()
        else:
            self._idle.set()
        for gateway_id, batch in outbox.batches.items():
            if (link := self._gateways.get(gateway_id)) is not None:
                link.send(batch)

    # Worker and KV manager.

    def _on_worker_opened(self, ready: WorkerReply) -> None:
        if isinstance(ready, StepRefused):
            raise from_reason(ready.reason, f"refused by the worker: {ready.message}")
        if not isinstance(ready, WorkerReady):
            raise ProtocolError("the worker's first message is not WorkerReady")
        if self._group.on_worker_ready(ready, time.monotonic()):
            log.info("worker resumed", epoch=self._group.epoch, last_step=ready.last_step)
        else:
            self._kvmanager.give_up(LinkClosedError("the worker has started over"), can_resume=False)
            self._has_worker_life.set()
        self._readiness.came_back(self._worker)
        self._tell_status()
        self._advance()

    def _on_worker_message(self, message: WorkerReply) -> None:
        self._readiness.step_ended(time.monotonic())
        self._group.on_worker_message(message)
        self._advance()

    def _on_worker_lost(self, error: OctavoError, can_resume: bool) -> None:
        self._group.worker_lost(can_resume=can_resume)
        if isinstance(error, UnresponsiveError):
            self._on_worker_hangs()
        if not can_resume:
            self._has_worker_life.clear()
        self._went_away(self._worker, error, can_resume)

    async def _connect_kv(self) -> KvLink:
        await self._has_worker_life.wait()
        return await self._connect_kvmanager()

    def _on_pool_opened(self, opened: KvManagerReply) -> None:
        if isinstance(opened, StreamRefused):
            raise from_reason(opened.reason, f"refused by the KV manager: {opened.message}")
        if not isinstance(opened, PoolOpened):
            raise ProtocolError("the KV manager's first message is not PoolOpened")
        if opened.boot_epoch < (least := self._least_boot_epoch()):
            raise StaleEpochError(f"KV manager of epoch {opened.boot_epoch}; there is one of epoch {least}")
        self._group.on_pool_opened(opened)
        self._kv_asked_at = time.monotonic() if self._group.has_unanswered_kv else None
        log.info("KV manager resumed" if opened.is_resumed else "KV manager opened the pool", epoch=self._group.epoch)
        self._readiness.came_back(self._kvmanager)
        self._tell_status()
        gc.collect()
        gc.freeze()
        self._collected_at = time.monotonic()
        self._advance()

    def _on_kv_message(self, message: KvManagerReply) -> None:
        self._group.on_kv_message(message)
        self._kv_asked_at = time.monotonic() if self._group.has_unanswered_kv else None
        self._advance()

    def _on_kv_lost(self, error: OctavoError, can_resume: bool) -> None:
        self._kv_asked_at = None
        if not self._group.kvmanager_lost(can_resume=can_resume):
            self._worker.give_up(LinkClosedError(f"the pool cannot be declared: {error}"), can_resume=False)
        self._went_away(self._kvmanager, error, can_resume)

    def _went_away(self, peer: Peer[Any, Any], error: OctavoError, can_resume: bool) -> None:
        self._readiness.went_away(peer, error, time.monotonic(), can_resume=can_resume)
        self._tell_status()
        self._advance()

    async def _watch(self) -> None:
        """Hold every wait to its deadline. For the time in which this process was suspended itself it blames nobody."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(_WATCH_INTERVAL_S)
            if time.monotonic() - began > _SUSPENDED_S:
                self._restart_clocks(time.monotonic())
            self._advance()  # waits for a leader may have lasted long enough
            now = time.monotonic()
            step, config = self.core.oldest_step, self._config
            if step is not None and now - step.launched_at > config.step_timeout_s and self.core.has_worker:
                error = UnresponsiveError(f"the worker has not finished a step within {config.step_timeout_s} s")
                self._worker.give_up(error, can_resume=False)
            if self._kv_asked_at is not None and now - self._kv_asked_at > config.kvmanager_timeout_s:
                error = UnresponsiveError(f"the KV manager has not answered within {config.kvmanager_timeout_s} s")
                self._kvmanager.give_up(error, can_resume=True)
            self._fail_overdue(now)
            self._tell_status()
            self._advance()
            self._tell_load()
            self._collect_garbage(now)

    def _restart_clocks(self, now: float) -> None:
        """What is waited for has the whole time from now on."""
        self.core.restart_step_clock(now)
        self._readiness.step_ended(now)
        if self._kv_asked_at is not None:
            self._kv_asked_at = now

    def _collect_garbage(self, now: float) -> None:
        """Between steps a search for cycles takes as long as many steps, and finds next to nothing."""
        since_s = now - self._collected_at
        if since_s > _LATEST_COLLECTION_S or (since_s > _COLLECTION_INTERVAL_S and not self.core.num_requests):
            gc.collect()
            self._collected_at = now

    def _fail_overdue(self, now: float) -> None:
        """A long absence fails what waits for its end."""
        away_s, reason = self._readiness.longest_absence(now)
        if away_s > self._config.recovery_timeout_s and self.core.num_requests:
            self.core.fail_all(NotReadyError(f"no worker and KV manager to serve this: {reason}"))
            self._advance()

    def _model_of(self, ready: WorkerReady) -> ModelInfo:
        """The model as this scheduler can serve it: a sequence never outgrows the pool."""
        limits = [ready.max_model_len, ready.num_blocks * ready.block_size]
        if self._config.max_model_len is not None:
            limits.append(self._config.max_model_len)
        if min(limits) < ready.max_model_len:
            log.info("sequence length limited", max_model_len=min(limits), model_allows=ready.max_model_len)
        own = self._config
        sizes = (own.max_num_seqs, own.max_num_batched_tokens, ready.max_num_seqs, ready.max_num_batched_tokens)
        return ModelInfo(
            model_name=ready.model_name,
            max_model_len=min(limits),
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            max_num_seqs=min(size for size in sizes if size is not None),
            block_size=ready.block_size,
        )

    # The life of the service.

    async def run(self, stop: Stop) -> None:
        """Serve until `stop`, then let running work end within the grace. What is left goes on elsewhere: gateways
        submit it to the next scheduler."""
        tasks = [asyncio.create_task(part) for part in (self._worker.keep(), self._kvmanager.keep(), self._watch())]
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises if a link's keeper has failed, which is a bug
            self._is_draining = True
            self._tell_status()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_grace_s):
                    await self._idle.wait()
        finally:
            for task in (stopped, *tasks):
                task.cancel()
            for task in (stopped, *tasks):
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            for link in list(self._gateways.values()):
                link.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)
