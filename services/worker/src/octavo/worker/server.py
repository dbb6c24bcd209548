"""Puts the compute thread on links: hellos, plans in, results out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from octavo.common.errors import OctavoError, ProtocolError, StaleEpochError
from octavo.common.links import Link
from octavo.common.messages.step import (
    StepPlan,
    StepRefused,
    StepResult,
    WorkerHello,
    WorkerReady,
    WorkerReply,
    WorkerRequest,
)
from octavo.common.tracing import Tracer
from octavo.worker.compute_thread import BuildCore, ComputeThread, Tenure
from octavo.worker.session import PlanFate, WorkerSession
from octavo.worker.slot_spans import SlotSpans

if TYPE_CHECKING:  # imports torch
    from octavo.worker.worker_core import WorkerCore

log = structlog.get_logger()

WorkerLink = Link[WorkerReply, WorkerRequest]


class WorkerServer:
    """Serves one scheduler at a time: a hello of the same or a higher epoch takes over, a lower one is turned away.

    A scheduler whose link ended keeps its session, with slots, memory and results, until the next hello: it may go on
    over a new link. Another one finds the memory as it was and all slots closed; it is answered when the steps and
    copies of its predecessor have ended, those that had not begun are dropped.

    Everything but the compute thread runs on the event loop in which it was made.
    """

    def __init__(self, build: BuildCore, tracer: Tracer | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[None] = self._loop.create_future()
        """Done when the model is loaded and warm; holds the error if that failed."""
        self._compute = ComputeThread(build, self._on_loaded)
        self._links: set[WorkerLink] = set()
        self._holder: WorkerLink | None = None
        self._tenure: Tenure | None = None
        self._session: WorkerSession | None = None
        """Of the present tenure, once its pool has begun."""
        self._ready: WorkerReady | None = None
        """What the present session was told when it began."""
        self._last_epoch = -1
        self._spans = SlotSpans(tracer) if tracer is not None else None

    def start(self) -> None:
        """Begin to load the model. Links may be accepted before and meanwhile."""
        self._compute.start()

    async def close(self, grace_s: float) -> None:
        """Close all links and end the compute thread, waiting `grace_s` for the step that runs."""
        for link in tuple(self._links):
            link.close()
        self._end_tenure()
        await asyncio.to_thread(self._compute.stop, grace_s)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def health(self) -> str:
        """Empty when ready; else what the worker is doing."""
        return self._compute.progress

    def why_restart(self, watchdog_s: float) -> str:
        """Empty unless one step has lasted for longer than that: then the device or its driver is stuck."""
        busy_s = self._compute.clock.busy_s
        return f"one step has lasted for {busy_s:.0f} s" if busy_s > watchdog_s else ""

    def accept(self, link: WorkerLink) -> None:
        """Serve a new stream."""
        self._links.add(link)
        link.bind(
            lambda message: self._on_message(link, message),
            lambda error: self._on_closed(link, error),
        )

    def _on_message(self, link: WorkerLink, message: WorkerRequest) -> None:
        if isinstance(message, WorkerHello):
            self._on_hello(link, message)
        elif link is self._holder and self._tenure is not None and self._session is not None:
            self._on_plan(self._tenure, self._session, message)
        else:
            self._turn_away(link, ProtocolError("a plan came before a hello was answered"))

    def _on_plan(self, tenure: Tenure, session: WorkerSession, plan: StepPlan) -> None:
        if session.accept(plan) is PlanFate.RUN:
            if self._spans is not None:
                self._spans.on_plan(plan)
            self._compute.submit(tenure, plan)
        elif (result := session.stored(plan.step_id)) is not None:
            self._send(result)

    def _on_hello(self, link: WorkerLink, hello: WorkerHello) -> None:
        if hello.epoch < self._last_epoch:
            self._turn_away(link, StaleEpochError(f"epoch {hello.epoch} came after {self._last_epoch}"))
            return
        self._last_epoch = hello.epoch
        replaced, self._holder = self._holder, link
        if replaced is not None and replaced is not link:
            self._refuse(replaced, StaleEpochError(f"epoch {hello.epoch} has said hello"))
        if self._session is not None and self._session.can_resume(hello):
            self._resume(self._session, hello)
        else:
            self._end_tenure()
            self._tenure = self._new_tenure(hello)
            self._compute.begin(self._tenure)

    def _resume(self, session: WorkerSession, hello: WorkerHello) -> None:
        """Go on over a new link. The results that follow are those that the scheduler lacks."""
        assert self._ready is not None
        self._send(replace(self._ready, is_resumed=True, last_step=session.last_step))
        for result in session.resume(hello):
            self._send(result)
        log.info("scheduler is back", epoch=session.epoch, last_step=session.last_step, last_result=hello.last_result)

    def _new_tenure(self, hello: WorkerHello) -> Tenure:
        def begin(ready: WorkerReady) -> None:
            if not tenure.is_over.is_set():
                self._session, self._ready = WorkerSession(hello.epoch, ready.incarnation), ready
                self._send(ready)

        def keep(reply: StepResult | StepRefused) -> None:
            if not tenure.is_over.is_set() and self._session is not None:
                if self._spans is not None:
                    self._spans.on_reply(reply)
                self._session.keep(reply)
                self._send(reply)

        def on_ready(core: WorkerCore) -> None:
            self._post(begin, _ready(core))

        def on_reply(reply: StepResult | StepRefused) -> None:
            self._post(keep, reply)

        tenure = Tenure(on_ready, on_reply, hello.begins_new_life)
        return tenure

    def _send(self, reply: WorkerReply) -> None:
        if self._holder is not None:
            self._holder.send(reply)

    def _end_tenure(self) -> None:
        if self._tenure is not None:
            self._tenure.is_over.set()
            if self._spans is not None:
                self._spans.drop_all()
            self._tenure = self._session = self._ready = None

    def _turn_away(self, link: WorkerLink, error: OctavoError) -> None:
        if link is self._holder:
            self._holder = None
            self._end_tenure()
        self._refuse(link, error)

    def _refuse(self, link: WorkerLink, error: OctavoError) -> None:
        """Tell the scheduler why, and end the stream."""
        log.warning("stream refused", reason=error.reason, error=error.message)
        link.send(StepRefused(0, error.reason, error.message))
        link.close()

    def _on_closed(self, link: WorkerLink, error: OctavoError | None) -> None:
        self._links.discard(link)
        if link is self._holder:
            log.info("scheduler left", error=error and error.message)
            self._holder = None

    def _on_loaded(self, error: BaseException | None) -> None:
        self._post(self._set_loaded, error)

    def _set_loaded(self, error: BaseException | None) -> None:
        if self.loaded.done():
            return
        if error is None:
            self.loaded.set_result(None)
        else:
            self.loaded.set_exception(error)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Run on the event loop; nowhere if that has ended."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("reply dropped, the event loop has ended")


def _ready(core: WorkerCore) -> WorkerReady:
    limits, generations = core.runner.limits, core.runner.slots.tables.generations
    return WorkerReady(
        incarnation=core.incarnation,
        model_name=core.model.name,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=core.model.eos_token_ids,
        num_host_blocks=core.runner.num_host_blocks,
        kv_format=core.model.kv_format,
        generations=generations if max(generations) >= 0 else (),
    )
