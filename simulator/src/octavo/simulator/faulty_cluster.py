"""The step cluster with links that are cut, that say things twice, and with services that die and come back."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from octavo.common.errors import OctavoError, StaleEpochError
from octavo.common.links import Link
from octavo.common.messages.kv import KvManagerReply, KvManagerRequest, KvReply, KvRequest, PoolOpened
from octavo.common.messages.step import (
    StepPlan,
    StepRefused,
    StepResult,
    WorkerHello,
    WorkerReady,
    WorkerReply,
    WorkerRequest,
)
from octavo.kvmanager.catalogue import CatalogueFolder
from octavo.kvmanager.pool import Pool
from octavo.kvmanager.server import KvManagerServer
from octavo.scheduler.worker_group import WorkerGroup
from octavo.simulator.scripted_worker import ScriptedWorker
from octavo.simulator.step_cluster import GATEWAY, StepCluster
from octavo.worker.session import PlanFate, WorkerSession

TWICE = (StepPlan, StepResult, KvRequest, KvReply)
"""Messages that a link may say twice."""


class SchedulersLink(Link[KvManagerReply, KvManagerRequest]):
    """The KV manager's end of a link whose other end is the cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: deque[KvManagerRequest] = deque()
        self.replies: deque[KvManagerReply] = deque()
        self.is_cut = self.was_closed = False
        self.is_open = False
        """The scheduler has got the answer to its opening."""

    def send(self, message: KvManagerReply) -> None:
        self.replies.append(message)

    def close(self) -> None:
        self.was_closed = True
        assert self.is_cut, "the KV manager refused a message"

    def receive(self, message: KvManagerRequest) -> None:
        self._deliver(message)


class SessionWorker:
    """A scripted worker that computes plans when it is told to, and outlives its links.

    When a scheduler takes over, the first plan in the queue may be a step that runs already: the hello is answered
    after it. All other plans are dropped.
    """

    def __init__(
        self,
        ready: Callable[[int, tuple[int, ...]], WorkerReady],
        start: Callable[[], ScriptedWorker],
        incarnations: itertools.count[int],
        chance: Random,
    ) -> None:
        self._ready, self._start = ready, start
        self._incarnations = incarnations
        self._chance = chance
        self._epoch = 0
        self._unanswered: WorkerHello | None = None
        """Until the step of an earlier scheduler has ended."""
        self.session: WorkerSession | None = None
        self.queue: deque[StepPlan] = deque()
        self.scripted = start()
        self.incarnation = next(incarnations)
        self.refusal: StepRefused | None = None

    @property
    def runs_old_step(self) -> bool:
        """A step of an earlier scheduler may still write to blocks."""
        return self._unanswered is not None

    def receive(self, message: WorkerRequest) -> list[WorkerReply]:
        if isinstance(message, WorkerHello):
            return self._hello(message)
        session = self.session
        assert session is not None
        if session.accept(message) is PlanFate.RUN:
            self.queue.append(message)
            return []
        stored = session.stored(message.step_id)
        return [] if stored is None else [stored]

    def compute(self) -> WorkerReply:
        """Run the next plan. One that names a block of an old generation is refused, and so are all after it."""
        plan = self.queue.popleft()
        self.refusal = self.refusal or self.scripted.refusal(plan)
        reply = self.scripted.run(plan) if self.refusal is None else replace(self.refusal, step_id=plan.step_id)
        if self._unanswered is not None:
            return self._take_over(self._unanswered)
        assert self.session is not None
        self.session.keep(reply)
        return reply

    def _hello(self, hello: WorkerHello) -> list[WorkerReply]:
        if hello.epoch < self._epoch:
            raise StaleEpochError(f"epoch {hello.epoch} after {self._epoch}")
        self._epoch = hello.epoch
        session = self.session
        if session is not None and session.can_resume(hello):
            ready = self._ready(session.incarnation, ())
            return [replace(ready, is_resumed=True, last_step=session.last_step), *session.resume(hello)]
        self.session = None
        has_begun = self.queue and (self.runs_old_step or self._chance.random() < 0.5)
        self.queue = deque(itertools.islice(self.queue, 1 if has_begun else 0))
        if has_begun:
            self._unanswered = hello
            return []
        return [self._take_over(hello)]

    def _take_over(self, hello: WorkerHello) -> WorkerReady:
        self._unanswered = None
        if hello.begins_new_life or self.refusal is not None:
            self.scripted = self._start()
            self.incarnation = next(self._incarnations)
            self.refusal = None
        else:
            self.scripted.close_slots()
        self.session = WorkerSession(hello.epoch, self.incarnation)
        return self._ready(self.incarnation, self.scripted.generations)


class WorkersLink:
    """Both directions of a link to the worker."""

    def __init__(self) -> None:
        self.requests: deque[WorkerRequest] = deque()
        self.replies: deque[WorkerReply] = deque()
        self.is_open = False


class FaultyCluster(StepCluster):
    """Four random things more than a step cluster: cuts, deaths, returns, and messages that come twice."""

    def __init__(
        self, *, catalogue_dir: Path | None = None, duplicate_rate: float = 0.0, check: bool = True, **settings: Any
    ) -> None:
        self._catalogue_dir = catalogue_dir
        self._duplicate_rate = duplicate_rate
        self._incarnations = itertools.count(1)
        self._boot_epochs = itertools.count(100)
        self._epochs = itertools.count(1)
        self._catalogues: CatalogueFolder | None = None
        self._check = check
        self.kv_back_at = self.worker_back_at = 0.0
        """When the link may come back."""
        self.may_be_refused = False
        """A plan that is not as the scheduler made it was on its way."""
        self.events: Counter[str] = Counter()
        super().__init__(**settings)

    def open(self) -> None:
        self.group = WorkerGroup(self.core, "pool", self._epochs, lambda ready: self.model)
        self.session_worker = self._new_worker()
        self.kv_link: SchedulersLink | None = None
        self.worker_link: WorkersLink | None = None
        self._start_kvmanager()
        while self.core.account is None:
            assert self.step()

    @property
    def pool(self) -> Pool:
        found = self.kvmanager.find_pool("pool")
        assert found is not None
        return found

    # Faults.

    def cut_worker_link(self, absence: int = 0, *, can_resume: bool = True) -> None:
        """What is on its way is lost. `absence`: milliseconds until the link may come back."""
        self.events["worker link cut"] += 1
        self.worker_link = None
        self.worker_back_at = self.now + absence * 0.001
        self.group.worker_lost(can_resume=can_resume)
        self._advance()

    def cut_kv_link(self, absence: int = 0, *, can_resume: bool = True) -> None:
        self.events["KV link cut"] += 1
        if self.kv_link is not None:
            self.kv_link.is_cut = True
        self.kv_link = None
        self.kv_back_at = self.now + absence * 0.001
        if not self.group.kvmanager_lost(can_resume=can_resume):
            self.events["declarations given up"] += 1
            self.cut_worker_link(can_resume=False)
        self._advance()

    def restart_kvmanager(self, absence: int = 0) -> None:
        self.events["KV manager died"] += 1
        self.cut_kv_link(absence)
        self._start_kvmanager()

    def restart_worker(self, absence: int = 0) -> None:
        self.events["worker died"] += 1
        self.cut_worker_link(absence)
        self.session_worker = self._new_worker()

    # Deliveries.

    def step(self) -> bool:
        self.now += 0.001
        deliveries = self._deliveries()
        if not deliveries:
            return max(self.kv_back_at, self.worker_back_at) > self.now
        self.random.choice(list(deliveries.values()))()
        return True

    def _deliveries(self) -> dict[str, Callable[[], None]]:
        """What could happen next, by the name of who does it."""
        deliveries: dict[str, Callable[[], None]] = {}
        if self.session_worker.queue:
            deliveries["worker computes"] = self._compute
        if self.worker_link is not None:
            if self.worker_link.requests:
                deliveries["to worker"] = self._deliver_to_worker
            if self.worker_link.replies:
                deliveries["from worker"] = self._deliver_from_worker
        elif self.now >= self.worker_back_at:
            deliveries["worker connects"] = self._connect_worker
        if self.kv_link is not None:
            if self.kv_link.requests:
                deliveries["to KV manager"] = self._deliver_to_kvmanager
            if self.kv_link.replies:
                deliveries["from KV manager"] = self._deliver_from_kvmanager
        elif self.now >= self.kv_back_at and self.group.has_worker_life:
            deliveries["KV manager connects"] = self._connect_kvmanager
        if self.slices:
            deliveries["KV manager hashes"] = self._hash_slice
        return deliveries

    def _hash_slice(self) -> None:
        self.slices.popleft()()

    def _connect_worker(self) -> None:
        self.worker_link = WorkersLink()
        self.worker_link.requests.append(self.group.hello())

    def _connect_kvmanager(self) -> None:
        self.kv_link = SchedulersLink()
        self.kv_link.requests.append(self.group.opening())
        self.kvmanager.accept(self.kv_link)

    def _compute(self) -> None:
        reply = self.session_worker.compute()
        if self.worker_link is not None and self.worker_link.is_open:
            self.worker_link.replies.append(reply)

    def _deliver_to_worker(self) -> None:
        assert self.worker_link is not None
        message = self._next(self.worker_link.requests)
        self.worker_link.replies.extend(self.session_worker.receive(message))
        self.worker_link.is_open = True

    def _deliver_from_worker(self) -> None:
        assert self.worker_link is not None
        message = self._next(self.worker_link.replies)
        if isinstance(message, StepRefused):
            self._on_refused(message)
        elif isinstance(message, StepResult):
            self.group.on_worker_message(message)
        elif self.group.on_worker_ready(message, self.now):
            self.events["worker resumed"] += 1
        else:
            self.events["worker started over"] += 1
            if self.kv_link is not None:
                self.cut_kv_link(can_resume=False)
        self._advance()

    def _on_refused(self, refused: StepRefused) -> None:
        """The scheduler gives up the link, and lets the worker start over."""
        assert self.may_be_refused, refused.message
        with contextlib.suppress(OctavoError):
            self.group.on_worker_message(refused)
        self.events["plan refused"] += 1
        self.cut_worker_link(can_resume=False)

    def _deliver_to_kvmanager(self) -> None:
        assert self.kv_link is not None
        self.kv_link.receive(self._next(self.kv_link.requests))

    def _deliver_from_kvmanager(self) -> None:
        assert self.kv_link is not None
        message = self._next(self.kv_link.replies)
        try:
            if isinstance(message, PoolOpened):
                self.group.on_pool_opened(message)
                self.events["KV link resumed" if message.is_resumed else "pool opened"] += 1
            else:
                self.group.on_kv_message(message)
        except OctavoError as error:
            assert error.reason == "LINK_CLOSED", error
            self.events["resumption withdrawn"] += 1
            self.cut_kv_link(can_resume=False)
        self._advance()

    def _next(self, queue: deque[Any]) -> Any:
        message = queue.popleft()
        if isinstance(message, TWICE) and self.random.random() < self._duplicate_rate:
            self.events["said twice"] += 1
            queue.insert(self.random.randrange(len(queue) + 1), message)
        return message

    def _advance(self) -> None:
        outbox = self.group.advance(self.now)
        if outbox.plans:
            assert self.worker_link is not None
            self.worker_link.requests.extend(outbox.plans)
        if outbox.kv_messages:
            assert self.kv_link is not None
            self.kv_link.requests.extend(outbox.kv_messages)
        self._take_batch(outbox.batches.get(GATEWAY))

    # Services.

    def _start_kvmanager(self) -> None:
        if self._catalogues is not None:
            self._catalogues.close()
        self.slices: deque[Callable[[], None]] = deque()
        """Work that the KV manager does between messages."""
        self._catalogues = None if self._catalogue_dir is None else CatalogueFolder(self._catalogue_dir)
        self.kvmanager = KvManagerServer(
            self._pool_settings,
            next(self._boot_epochs),
            self._check,
            self._catalogues,
            call_soon=self.slices.append,
        )

    def _new_worker(self) -> SessionWorker:
        def start() -> ScriptedWorker:
            model = self.model
            self.worker = ScriptedWorker(
                self._num_blocks,
                model.block_size,
                model.max_num_seqs,
                model.vocab_size,
                self._num_host_blocks,
                self.random,
            )
            return self.worker

        def ready(incarnation: int, generations: tuple[int, ...]) -> WorkerReady:
            model = self.model
            return WorkerReady(
                incarnation=incarnation,
                model_name=model.model_name,
                num_blocks=self._num_blocks,
                block_size=model.block_size,
                max_num_seqs=model.max_num_seqs,
                max_num_batched_tokens=2048,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
                num_host_blocks=self._num_host_blocks,
                generations=generations,
            )

        return SessionWorker(ready, start, self._incarnations, self.random)
