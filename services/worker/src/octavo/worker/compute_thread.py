"""The thread that owns the core: loads the model, then runs queued plans in order. The event loop does the links."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from octavo.common.messages.step import StepPlan, StepRefused, StepResult
from octavo.worker import metrics

if TYPE_CHECKING:  # these import torch, which takes seconds; the service listens before
    from octavo.worker.runner import LaunchedStep, StepSamples
    from octavo.worker.worker_core import WorkerCore

log = structlog.get_logger()

MAX_UINT32 = 2**32 - 1

SetProgress = Callable[[str], None]
BuildCore = Callable[[SetProgress], "WorkerCore"]
"""Loads the model and warms it up, telling how far it is. Runs on the compute thread."""


@dataclass(eq=False, slots=True)
class Tenure:
    """A scheduler's hold on the worker: from a hello that starts over to the next such hello. It outlives the link."""

    on_ready: Callable[[WorkerCore], None]
    """The core starts afresh for this scheduler. Called on the compute thread, as is the next."""
    on_reply: Callable[[StepResult | StepRefused], None]
    begins_new_life: bool
    """See WorkerHello."""
    is_over: threading.Event = field(default_factory=threading.Event)


class StepClock:
    """How long the worker has been at one step. The compute thread begins steps; they end in any one thread."""

    def __init__(self) -> None:
        self._num_begun = self._num_ended = 0
        self._since = 0.0

    def begin(self) -> None:
        if self._num_begun == self._num_ended:
            self._since = time.monotonic()
        self._num_begun += 1

    def end(self) -> None:
        """The next one that has begun runs from now on."""
        self._since = time.monotonic()
        self._num_ended += 1

    @property
    def busy_s(self) -> float:
        """0 while no step runs."""
        return time.monotonic() - self._since if self._num_begun > self._num_ended else 0.0


class LoadingClock:
    """How long each stage of loading took."""

    def __init__(self) -> None:
        self._stage, self._since = "", time.monotonic()
        self.seconds: dict[str, float] = {}

    def begin(self, progress: str) -> None:
        """The same stage if it differs in its percentage only. An empty one ends the last."""
        stage = progress.rstrip("0123456789 %")
        if stage == self._stage:
            return
        now = time.monotonic()
        if self._stage:
            self.seconds[self._stage] = round(self.seconds.get(self._stage, 0.0) + now - self._since, 1)
        self._stage, self._since = stage, now


class ComputeThread:
    """Plans go in from any thread, replies come out on the compute thread."""

    def __init__(self, build: BuildCore, on_loaded: Callable[[BaseException | None], None]) -> None:
        """`on_loaded` is called on the compute thread once, with what went wrong or None."""
        self._build = build
        self._on_loaded = on_loaded
        self._queue: queue.SimpleQueue[tuple[Tenure, StepPlan | None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)
        self._core: WorkerCore | None = None
        """Outlives the thread: to free what a core has on a GPU takes longer than `stop` may wait."""
        self.progress = "not started"
        self._loading = LoadingClock()
        self.clock = StepClock()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End after the step that runs. Waits for it, at most `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def begin(self, tenure: Tenure) -> None:
        """Start over for this scheduler, after what is queued."""
        self._queue.put((tenure, None))

    def submit(self, tenure: Tenure, plan: StepPlan) -> None:
        """Queue a plan. It is dropped if the tenure is over when its turn comes."""
        self._queue.put((tenure, plan))

    def _main(self) -> None:
        try:
            self._core = self._build(self._set_progress)
        except BaseException as error:
            self.progress = f"loading failed: {error}"
            self._on_loaded(error)
            return
        self._set_progress("")
        if self._loading.seconds:
            log.info("start took", seconds=self._loading.seconds)
        self._on_loaded(None)
        self._serve(self._core)

    def _set_progress(self, progress: str) -> None:
        self.progress = progress
        self._loading.begin(progress)

    def _serve(self, core: WorkerCore) -> None:
        waiter = ResultWaiter(core, self.clock)
        idle_since: float | None = time.perf_counter()
        while (item := self._queue.get()) is not None:
            tenure, plan = item
            if tenure.is_over.is_set():
                continue
            if plan is None:
                waiter.drain()
                core.start_over(begins_new_life=tenure.begins_new_life)
                tenure.on_ready(core)
                continue
            self.clock.begin()
            started = time.perf_counter()
            launched = core.launch(plan)
            if core.runner.is_asynchronous:
                waiter.submit(tenure, plan, launched)
                continue
            outcome = launched if isinstance(launched, StepRefused) else core.wait(plan, launched)
            ended = time.perf_counter()
            idle_s = 0.0 if idle_since is None else started - idle_since
            idle_since = ended if self._queue.empty() else None
            finish(core, tenure, plan, outcome, idle_s=idle_s, compute_s=ended - started)
            self.clock.end()
        waiter.stop()


class ResultWaiter:
    """A thread that waits for launched steps in order, while the compute thread launches the next."""

    def __init__(self, core: WorkerCore, clock: StepClock) -> None:
        self._core = core
        self._clock = clock
        self._queue: queue.SimpleQueue[tuple[Tenure, StepPlan, LaunchedStep | StepRefused] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._main, name="results", daemon=True)
        self._thread.start()

    def submit(self, tenure: Tenure, plan: StepPlan, launched: LaunchedStep | StepRefused) -> None:
        """Answer the plan once it has ended, after all that were submitted before."""
        self._queue.put((tenure, plan, launched))

    def drain(self) -> None:
        """Wait until all that was submitted has been answered."""
        drained = threading.Event()
        self._queue.put(drained)
        drained.wait()

    def stop(self) -> None:
        """End after what was submitted, and wait for that."""
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            tenure, plan, launched = item
            idle_s = compute_s = 0.0
            if isinstance(launched, StepRefused):
                outcome: StepSamples | StepRefused = launched
            else:
                outcome = self._core.wait(plan, launched)
                idle_s, compute_s = launched.measured_s
            finish(self._core, tenure, plan, outcome, idle_s=idle_s, compute_s=compute_s)
            self._clock.end()


def finish(
    core: WorkerCore,
    tenure: Tenure,
    plan: StepPlan,
    outcome: StepSamples | StepRefused,
    *,
    idle_s: float,
    compute_s: float,
) -> None:
    """Answer a plan, then count it."""
    tenure.on_reply(_reply(plan, outcome, idle_s=idle_s, compute_s=compute_s))
    _count(plan, outcome, idle_s=idle_s, compute_s=compute_s)
    metrics.OPEN_SLOTS.set(core.runner.slots.num_open)


def _reply(
    plan: StepPlan, outcome: StepSamples | StepRefused, *, idle_s: float, compute_s: float
) -> StepResult | StepRefused:
    if isinstance(outcome, StepRefused):
        return outcome
    return StepResult(
        step_id=plan.step_id,
        token_ids=outcome.token_ids,
        logprobs=outcome.logprobs,
        compute_us=min(int(compute_s * 1e6), MAX_UINT32),
        idle_us=min(int(idle_s * 1e6), MAX_UINT32),
        finished_transfers=outcome.transfers.transfer_ids,
        transfer_us=min(outcome.transfers.copy_us, MAX_UINT32),
        prompt_logprobs=outcome.prompt_logprobs,
    )


def _count(plan: StepPlan, outcome: StepSamples | StepRefused, *, idle_s: float, compute_s: float) -> None:
    metrics.IDLE_SECONDS.inc(idle_s)
    if isinstance(outcome, StepRefused):
        metrics.REFUSED_PLANS.labels(outcome.reason).inc()
        return
    num_decodes = plan.lengths.count(1)
    metrics.STEP_SECONDS.observe(compute_s)
    metrics.DECODE_TOKENS.inc(num_decodes)
    metrics.PREFILL_TOKENS.inc(sum(plan.lengths) - num_decodes)
    metrics.SAMPLED_TOKENS.inc(len(outcome.token_ids))
    metrics.NOT_FINITE_TOKENS.inc(outcome.token_ids.count(-1))
