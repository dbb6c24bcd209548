"""The core with its two sessions: all that lies between the links of one worker group, without I/O.

worker's link lost       nothing is launched; plans are kept until their results are here
  it resumes             plans that it lacks are sent again, results that are missing come again
  it starts over         every sequence waits, with its tokens; the KV manager opens the pool anew
KV manager's link lost   decode goes on with credits, then with recycled blocks; nothing is admitted
  it resumes             messages that it lacks are sent again, replies that are missing come again
  it starts over         it is told all that is held, and makes its pool of that; nothing is recomputed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.common.errors import LinkClosedError, NotReadyError, ProtocolError, from_reason
from octavo.common.messages.generation import ModelInfo, TokenBatch
from octavo.common.messages.kv import DeclarePool, KvManagerReply, KvRequest, OpenPool, PoolOpened, StreamRefused
from octavo.common.messages.step import StepPlan, StepRefused, StepResult, WorkerHello, WorkerReady, WorkerReply
from octavo.scheduler.core import SchedulerCore
from octavo.scheduler.kv_session import KvSession
from octavo.scheduler.worker_session import WorkerSession

MAX_DECLARATIONS = 3
"""Declarations in a row that no reply follows; then the worker is made to start over."""


@dataclass(slots=True)
class GroupOutbox:
    """What is to be sent now, in this order."""

    plans: list[StepPlan] = field(default_factory=list)
    """Empty while the worker's link is lost."""
    kv_messages: list[DeclarePool | KvRequest] = field(default_factory=list)
    """Empty while the KV manager's link is lost."""
    batches: dict[int, TokenBatch] = field(default_factory=dict)
    """By gateway."""


class WorkerGroup:
    """Drives one worker and its block pool. After an error that an `on_*` method raises, the link must be given up."""

    def __init__(
        self,
        core: SchedulerCore,
        pool_id: str,
        epochs: Iterator[int],
        model_of: Callable[[WorkerReady], ModelInfo],
    ) -> None:
        """`model_of`: the model of a worker as this scheduler serves it. `epochs`: see `WorkerSession`."""
        self.core = core
        core.has_worker = core.has_kvmanager = False
        self._pool_id = pool_id
        self._model_of = model_of
        self._worker = WorkerSession(epochs)
        self._kv = KvSession()
        self._ready: WorkerReady | None = None
        self._plans_again: list[StepPlan] = []
        self._kv_again: list[DeclarePool | KvRequest] = []
        self._num_declarations = 0

    @property
    def epoch(self) -> int:
        """The fencing number of this scheduler."""
        return self._worker.epoch

    @property
    def has_worker_life(self) -> bool:
        """There is a worker, or one that may resume, whose blocks the KV manager can keep."""
        return bool(self._worker.incarnation)

    @property
    def has_unanswered_kv(self) -> bool:
        """A message to the KV manager waits for its reply."""
        return self._kv.has_unanswered

    @property
    def _has_recycled(self) -> bool:
        return self.core.account is not None and self.core.account.has_recycled

    # The worker's link.

    def hello(self) -> WorkerHello:
        """The first message on a new link to the worker."""
        return self._worker.hello()

    def on_worker_ready(self, ready: WorkerReady, now: float) -> bool:
        """The answer to the hello. False if the worker starts over: then the KV manager's link must be opened anew."""
        again = self._worker.on_ready(ready)
        self._ready = ready
        self.core.has_worker = True
        if again is None:
            self.core.pool_lost()
            self._kv.start_over()
            self._num_declarations = 0
            return False
        self._plans_again = again
        self.core.stats.num_worker_resumes += 1
        self.core.restart_step_clock(now)
        return True

    def on_worker_message(self, message: WorkerReply) -> None:
        """A result. Raises OctavoError if worker and scheduler do not understand each other any more."""
        match message:
            case StepResult():
                if self._worker.is_news(message):
                    self.core.on_step_result(message)
            case StepRefused():
                refused = f"step {message.step_id} refused" if message.step_id else "refused by the worker"
                raise from_reason(message.reason, f"{refused}: {message.message}")
            case WorkerReady():
                raise ProtocolError("the worker said hello twice")

    def worker_lost(self, *, can_resume: bool) -> None:
        """The link to the worker has ended. `can_resume`: in nobody's fault, so that the next one may go on."""
        self.core.has_worker = False
        self._plans_again = []
        if not can_resume:
            self._worker.give_up()

    # The KV manager's link.

    def opening(self) -> OpenPool:
        """The first message on a new link to the KV manager. Raises NotReadyError if there is no worker: until it has
        answered the hello, steps of an earlier scheduler may write to blocks."""
        ready = self._ready
        if ready is None or not self.has_worker_life:
            raise NotReadyError("no worker whose blocks could be kept")
        if self._has_recycled:
            self._kv.start_over()
        return OpenPool(
            self._pool_id,
            self._worker.epoch,
            ready.incarnation,
            ready.num_blocks,
            ready.block_size,
            ready.num_host_blocks,
            self._kv.boot_epoch,
            self._kv.last_reply_no,
            ready.kv_format,
            ready.generations if self.core.account is None else (),
        )

    def on_pool_opened(self, opened: PoolOpened) -> None:
        """The answer to the opening. Raises ProtocolError."""
        ready = self._ready
        assert ready is not None
        if opened.is_resumed and self._has_recycled:
            raise LinkClosedError("blocks were used again while the pool was opened; it has to be declared")
        again = self._kv.on_opened(opened)
        if again is not None:
            self._kv_again = list(again)
            self.core.stats.num_kvmanager_resumes += 1
        elif self.core.account is None:
            highest_generation = max(ready.generations, default=0)
            self.core.start(self._model_of(ready), ready.num_blocks, ready.max_num_batched_tokens, highest_generation)
        else:
            self._num_declarations += 1
            self._kv_again = [self.core.declare()]
        self.core.has_kvmanager = True

    def on_kv_message(self, message: KvManagerReply) -> None:
        """A reply. Raises OctavoError if KV manager and scheduler do not understand each other any more."""
        if isinstance(message, PoolOpened):
            raise ProtocolError("the KV manager opened the pool twice")
        if isinstance(message, StreamRefused):
            raise from_reason(message.reason, f"refused by the KV manager: {message.message}")
        if self._kv.is_news(message):
            self.core.on_kv_reply(message)
            self._num_declarations = 0

    def kvmanager_lost(self, *, can_resume: bool) -> bool:
        """The link to the KV manager has ended. False if it is of no use to open it again: the worker must start over,
        and its link be given up."""
        self.core.has_kvmanager = False
        self._kv_again = []
        if not can_resume:
            self._kv.start_over()
        return self._num_declarations < MAX_DECLARATIONS

    # Sending.

    def advance(self, now: float) -> GroupOutbox:
        """Launch what can be launched, and collect what is to be sent. Call it after every event."""
        outbox = self.core.advance(now)
        for plan in outbox.plans:
            self._worker.sent(plan)
        sending = GroupOutbox(self._plans_again + outbox.plans, self._kv_again, outbox.batches)
        if outbox.kv_request is not None:
            self._kv.sent(outbox.kv_request)
            sending.kv_messages.append(outbox.kv_request)
        self._plans_again, self._kv_again = [], []
        return sending
