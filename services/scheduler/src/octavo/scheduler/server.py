"""Puts the scheduler core on links: gateways on one side, the KV manager and the worker on the other."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from octavo.common.errors import LinkClosedError, NotReadyError, OctavoError, ProtocolError, from_reason
from octavo.common.links import Link
from octavo.common.messages.generation import (
    Abort,
    GatewayMessage,
    ModelInfo,
    SchedulerMessage,
    SchedulerStatus,
    Submit,
)
from octavo.common.messages.kv import KvManagerReply, KvManagerRequest, KvReply, OpenPool, PoolOpened
from octavo.common.messages.step import (
    StepRefused,
    StepResult,
    WorkerHello,
    WorkerReady,
    WorkerReply,
    WorkerRequest,
)
from octavo.common.runtime import Stop
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.core import CoreSettings, SchedulerCore

log = structlog.get_logger()

KvLink = Link[KvManagerRequest, KvManagerReply]
WorkerLink = Link[WorkerRequest, WorkerReply]
GatewayLink = Link[SchedulerMessage, GatewayMessage]

_WATCH_INTERVAL_S = 0.5
_MAX_BACKOFF_S = 2.0


class SchedulerServer:
    """Drives one worker group. `run` connects, serves, and connects again when a link is lost."""

    def __init__(
        self,
        config: SchedulerConfig,
        connect_kvmanager: Callable[[], Awaitable[KvLink]],
        connect_worker: Callable[[], Awaitable[WorkerLink]],
    ) -> None:
        self.core = SchedulerCore(
            CoreSettings(
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_waiting=config.max_num_waiting,
                max_num_choices=config.max_num_choices,
                pipeline_depth=config.pipeline_depth,
                prefix_cache=config.prefix_cache,
                credits_per_sequence=config.credits_per_sequence,
                single_flight_timeout_s=config.single_flight_timeout_s,
            )
        )
        self._config = config
        self._connect_kvmanager = connect_kvmanager
        self._connect_worker = connect_worker
        self._gateways: dict[int, GatewayLink] = {}
        self._gateway_ids = itertools.count(1)
        self._epochs = itertools.count(int(time.time() * 1000))
        self._kv_link: KvLink | None = None
        self._worker_link: WorkerLink | None = None
        self._lost: asyncio.Future[OctavoError] | None = None
        self._status = SchedulerStatus(ready=False, reason="not connected to a worker yet", model=None)
        self._kv_asked_at: float | None = None
        self._is_draining = False
        self._idle = asyncio.Event()
        """No request is alive."""

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
        link.bind(
            lambda message: self._on_gateway_message(gateway_id, message),
            lambda error: self._on_gateway_closed(gateway_id, error),
        )

    def _on_gateway_message(self, gateway_id: int, message: GatewayMessage) -> None:
        match message:
            case Submit():
                self.core.on_submit(gateway_id, message)
            case Abort():
                self.core.on_abort(gateway_id, message)
        self._advance()

    def _on_gateway_closed(self, gateway_id: int, error: OctavoError | None) -> None:
        if error is not None:
            log.warning("gateway lost", gateway_id=gateway_id, error=str(error))
        self._gateways.pop(gateway_id, None)
        self.core.on_gateway_lost(gateway_id)
        self._advance()

    def _set_status(self, *, ready: bool, reason: str) -> None:
        self._status = SchedulerStatus(ready=ready, reason=reason, model=self.core.model)
        for link in self._gateways.values():
            link.send(self._status)

    # The step path.

    def _advance(self) -> None:
        """Send what the core has to say: steps first, since only they are on the GPU's path."""
        now = time.monotonic()
        outbox = self.core.advance(now)
        if self._worker_link is not None:
            for plan in outbox.plans:
                self._worker_link.send(plan)
        if outbox.kv_request is not None and self._kv_link is not None:
            self._kv_link.send(outbox.kv_request)
            if self._kv_asked_at is None:
                self._kv_asked_at = now
        if self.core.num_requests:
            self._idle.clear()
        else:
            self._idle.set()
        for gateway_id, batch in outbox.batches.items():
            if (link := self._gateways.get(gateway_id)) is not None:
                link.send(batch)

    def _on_worker_message(self, message: WorkerReply) -> None:
        match message:
            case StepResult():
                self._take(lambda: self.core.on_step_result(message))
            case StepRefused():
                self._give_up(from_reason(message.reason, f"step {message.step_id} refused: {message.message}"))
            case _:
                self._give_up(ProtocolError("the worker said hello twice"))

    def _on_kv_message(self, message: KvManagerReply) -> None:
        if not isinstance(message, KvReply):
            self._give_up(ProtocolError("the KV manager opened the pool twice"))
            return
        self._take(lambda: self.core.on_kv_reply(message))
        account = self.core.account
        self._kv_asked_at = None if account is None or account.is_settled else time.monotonic()

    def _take(self, event: Callable[[], None]) -> None:
        try:
            event()
        except OctavoError as error:
            self._give_up(error)
        else:
            self._advance()

    def _give_up(self, error: OctavoError) -> None:
        """Start over with worker and KV manager."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(error)

    # Connections.

    async def run(self, stop: Stop) -> None:
        """Serve until `stop`, then let running work end within the grace."""
        keep_connected = asyncio.create_task(self._keep_connected())
        try:
            await stop.wait()
            self._is_draining = True
            self._set_status(ready=False, reason="shutting down")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), self._config.drain_grace_s)
            self.core.fail_all(NotReadyError("the server is shutting down"))
            self._advance()
        finally:
            keep_connected.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keep_connected
            for link in list(self._gateways.values()):
                link.close()

    async def _keep_connected(self) -> None:
        backoff_s = 0.05
        lost_at = time.monotonic()
        while True:
            try:
                await self._connect()
                backoff_s = 0.05
                error = await self._watch()
                lost_at = time.monotonic()
            except (OSError, TimeoutError, OctavoError) as failure:
                error = failure if isinstance(failure, OctavoError) else LinkClosedError(str(failure))
            finally:
                self._disconnect()
            if not self._is_draining and (self._status.ready or self._status.reason != error.message):
                log.warning("worker or KV manager away", error=error.message)
                self._set_status(ready=False, reason=error.message)
            if self.core.num_requests and time.monotonic() - lost_at > self._config.recovery_timeout_s:
                self.core.fail_all(NotReadyError(f"no worker and KV manager to serve this: {error.message}"))
            self._advance()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _connect(self) -> None:
        """Worker, then KV manager, then the core starts on an empty pool."""
        epoch = next(self._epochs)
        self._worker_link = await self._connect_worker()
        ready = await self._first_message(self._worker_link, WorkerHello(epoch), self._config.load_timeout_s)
        if not isinstance(ready, WorkerReady):
            raise ProtocolError("the worker's first message is not WorkerReady")
        self._kv_link = await self._connect_kvmanager()
        opening = OpenPool(self._config.pool_id, epoch, ready.incarnation, ready.num_blocks, ready.block_size)
        opened = await self._first_message(self._kv_link, opening, self._config.kvmanager_timeout_s)
        if not isinstance(opened, PoolOpened):
            raise ProtocolError("the KV manager's first message is not PoolOpened")
        self._lost = asyncio.get_running_loop().create_future()
        self._worker_link.bind(self._on_worker_message, self._on_link_closed("worker"))
        self._kv_link.bind(self._on_kv_message, self._on_link_closed("KV manager"))
        self.core.start(self._model_of(ready), ready.num_blocks, ready.max_num_batched_tokens)
        self._kv_asked_at = None
        log.info(
            "serving", model=ready.model_name, num_blocks=ready.num_blocks, block_size=ready.block_size, epoch=epoch
        )
        if not self._is_draining:
            self._set_status(ready=True, reason="")
        gc.collect()
        gc.freeze()
        self._advance()

    async def _first_message(self, link: Link[Any, Any], opening: Any, timeout_s: float) -> Any:
        """Send the opening and wait for its answer; `bind` again afterwards receives the rest."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_message(message: Any) -> None:
            if not answer.done():
                answer.set_result(message)

        def on_closed(error: OctavoError | None) -> None:
            if not answer.done():
                answer.set_exception(error or LinkClosedError("the link was closed before it was open"))

        link.bind(on_message, on_closed)
        link.send(opening)
        return await asyncio.wait_for(answer, timeout_s)

    def _on_link_closed(self, peer: str) -> Callable[[OctavoError | None], None]:
        return lambda error: self._give_up(LinkClosedError(f"{peer} lost" + (f": {error}" if error else "")))

    def _model_of(self, ready: WorkerReady) -> ModelInfo:
        """The model as this scheduler can serve it: a sequence never outgrows the pool."""
        limits = [ready.max_model_len, ready.num_blocks * ready.block_size]
        if self._config.max_model_len is not None:
            limits.append(self._config.max_model_len)
        if min(limits) < ready.max_model_len:
            log.info("sequence length limited", max_model_len=min(limits), model_allows=ready.max_model_len)
        return ModelInfo(
            model_name=ready.model_name,
            max_model_len=min(limits),
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            max_num_seqs=min(self._config.max_num_seqs, ready.max_num_seqs, ready.max_num_batched_tokens),
            block_size=ready.block_size,
        )

    async def _watch(self) -> OctavoError:
        """Wait until a link is lost or a deadline has passed."""
        assert self._lost is not None
        while True:
            done, _ = await asyncio.wait([self._lost], timeout=_WATCH_INTERVAL_S)
            if done:
                return self._lost.result()
            self._advance()  # deadlines may have passed
            now = time.monotonic()
            launched_at = self.core.oldest_launch_at
            if launched_at is not None and now - launched_at > self._config.step_timeout_s:
                return LinkClosedError(f"the worker has not finished a step within {self._config.step_timeout_s} s")
            if self._kv_asked_at is not None and now - self._kv_asked_at > self._config.kvmanager_timeout_s:
                return LinkClosedError(f"the KV manager has not answered within {self._config.kvmanager_timeout_s} s")

    def _disconnect(self) -> None:
        self._lost = None
        for link in (self._worker_link, self._kv_link):
            if link is not None:
                link.close()
        self._worker_link = self._kv_link = None
        self.core.pool_lost()
