"""The scheduler's core: every event that changes something, and `advance`, which says what is to be sent.

Sans-I/O: messages and the time go in by the `on_*` methods, and `advance` returns what goes out. Who does the work:

Requests      requests.py      live requests, what ends them, batches for gateways
Places        places.py        the waiting line, kept choices; every move from one place to another
and, from the start of a worker's pool to its loss:
WorkerPool    worker_pool.py   blocks and slots, who runs, steps on their way
Forks         forks.py         who asks to share another's blocks
Admissions    admissions.py    who asks for blocks, and the answers
Relief        relief.py        who gives way when blocks or slots run out
StepResults   step_results.py  what a step's result does
Pipeline      pipeline.py      launches steps
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.common.errors import MessageGapError, OctavoError
from octavo.common.messages.generation import Abort, Forget, ModelInfo, SchedulerLoad, Submit, TokenBatch
from octavo.common.messages.kv import DeclarePool, KvReply, KvRequest, Verdict, WaitReason
from octavo.common.messages.step import StepPlan, StepResult
from octavo.scheduler.admissions import Admissions
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.forks import Forks
from octavo.scheduler.launcher import LaunchedStep
from octavo.scheduler.pipeline import Pipeline
from octavo.scheduler.places import Places
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.preemption_cost import PreemptionCost
from octavo.scheduler.relief import Relief
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.request_records import WaitCause
from octavo.scheduler.requests import Requests
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.step_results import StepResults
from octavo.scheduler.worker_pool import WorkerPool


@dataclass(slots=True)
class Outbox:
    """What is to be sent now, in this order."""

    plans: list[StepPlan] = field(default_factory=list)
    kv_request: KvRequest | None = None
    batches: dict[int, TokenBatch] = field(default_factory=dict)
    """By gateway."""


@dataclass(frozen=True, slots=True)
class PoolLife:
    """All that begins with a worker's pool and ends with it."""

    pool: WorkerPool
    forks: Forks
    admissions: Admissions
    relief: Relief
    results: StepResults
    pipeline: Pipeline
    preemption: Preemption


class SchedulerCore:
    """The life of every request, and the step pipeline of one worker group.

    Between `pool_lost` and `start` nothing runs; requests wait, with the tokens that they have.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self.stats = SchedulerStats()
        self.log = RequestLog(settings.num_explained_requests, self.stats.timeline)
        self.has_worker = self.has_kvmanager = True
        """Whether there is a link to it. Without a worker nothing is launched; without a KV manager decode goes on with
        the credits in hand and with recycled blocks, and nothing is admitted, preempted or told."""
        self._settings = settings
        self._places = Places(settings.max_num_kept, self.log)
        self._requests = Requests(settings, self._places, self.log, self.stats)
        self._life: PoolLife | None = None

    # What a server looks at.

    @property
    def model(self) -> ModelInfo | None:
        """Of the present worker, or of the last one."""
        return self._requests.model

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._places.waiting)

    @property
    def num_parked(self) -> int:
        """Of those that wait, the ones that wait for a block that another sequence computes."""
        return self._places.waiting.num_parked

    @property
    def num_running(self) -> int:
        return len(self._life.pool.running) if self._life else 0

    @property
    def num_swapped(self) -> int:
        return sum(1 for _ in self._life.pool.swapping) if self._life else 0

    def present(self) -> tuple[list[Sequence], list[Sequence], Iterator[Sequence]]:
        """Sequences that run, that are swapped, and that wait; the latter roughly in the order of the line."""
        life = self._life
        if life is None:
            return [], [], iter(self._places.waiting)
        waiting = itertools.chain(life.admissions.asking, life.forks.asking, self._places.waiting)
        return list(life.pool.running.values()), list(life.pool.swapping), waiting

    @property
    def load(self) -> SchedulerLoad:
        """What there is to do, for those who choose among schedulers."""
        waiting = sum(len(sequence.token_ids) for sequence in self._places.waiting)
        if self._life is None:
            return SchedulerLoad(self.num_waiting, waiting)
        pool, cost = self._life.pool, self._life.preemption.cost
        return SchedulerLoad(
            num_waiting=self.num_waiting,
            num_waiting_tokens=waiting,
            num_running=len(pool.running),
            max_num_running=self.model.max_num_seqs if self.model else 0,
            num_blocks=pool.account.num_blocks,
            num_available_blocks=pool.account.counts.allocatable,
            prefill_tokens_per_s=cost.prefill_tokens_per_s if cost.knows_prefill else 0.0,
        )

    @property
    def account(self) -> BlockAccount | None:
        """The account with the present pool."""
        return self._life.pool.account if self._life else None

    @property
    def cost(self) -> PreemptionCost | None:
        """What blocks cost on the present worker."""
        return self._life.preemption.cost if self._life else None

    @property
    def oldest_step(self) -> LaunchedStep | None:
        """Of those on their way."""
        return self._life.pool.steps.oldest if self._life else None

    # Worker and KV manager come and go.

    def start(
        self, model: ModelInfo, num_blocks: int, max_num_batched_tokens: int, highest_generation: int = 0
    ) -> None:
        """A worker with closed slots and a KV manager that knows of no sequence are there.

        `max_num_batched_tokens` is the worker's own limit; a step keeps to the lower of both. `highest_generation` is
        that of the blocks that the worker has seen.
        """
        self.log.pool_is_back()
        self._requests.serve(model)
        self._life = self._begin_life(model, WorkerPool(model, num_blocks, highest_generation), max_num_batched_tokens)
        self._places.enter(self._life.pool)

    def _begin_life(self, model: ModelInfo, pool: WorkerPool, max_num_batched_tokens: int) -> PoolLife:
        settings, places, requests, log, stats = self._settings, self._places, self._requests, self.log, self.stats
        limit = min(settings.max_num_batched_tokens or max_num_batched_tokens, max_num_batched_tokens)
        preemption = Preemption(settings.preemption, model.block_size, pool.swapping)
        log.cost = preemption.cost
        forks = Forks(pool, places, requests, log, self.stats)
        admissions = Admissions(settings, limit, pool, places, requests, forks, log, stats)
        relief = Relief(preemption, pool, places, requests, forks, admissions, log, stats)
        results = StepResults(
            pool, places, requests, forks, relief, preemption, log, stats, publishes=settings.prefix_cache
        )
        pipeline = Pipeline(settings, limit, pool, places, forks, admissions, relief, stats)
        return PoolLife(pool, forks, admissions, relief, results, pipeline, preemption)

    def pool_lost(self) -> None:
        """The worker starts over: every sequence goes back to the queue with the tokens it has."""
        life, self._life = self._life, None
        if life is None:
            return
        self.stats.num_pool_losses += 1
        running, swapped = life.pool.running.values(), life.pool.swapping
        self._places.lose_pool([*running, *life.admissions.asking, *life.forks.asking, *swapped])

    def declare(self) -> DeclarePool:
        """What a KV manager must be told that knows nothing of the pool, which is as it was.

        Admissions that it has not answered are asked anew, and so are forks of sequences that are still there.
        """
        life = self._life
        assert life is not None, "no pool to declare"
        self.stats.num_declarations += 1
        life.relief.lose_swapped()
        life.admissions.forget_answers()
        holders = {sequence.sequence_id: sequence for sequence in self._places.holders}
        life.forks.give_up_without_parent(holders)
        steps = life.pool.steps
        declaration = life.pool.account.declare(
            holders.values(),
            max(steps.last_launched, steps.barrier),
            steps.last_acknowledged,
            publishes=self._settings.prefix_cache,
        )
        life.forks.are_declared(holders)
        self._places.arrive_anew()
        return declaration

    def restart_step_clock(self, now: float) -> None:
        """The worker is back: the time of its steps on their way counts from now."""
        if self._life is not None:
            self._life.pool.steps.restart_clock(now)

    def fail_all(self, error: OctavoError) -> None:
        """End every request in `error`."""
        for request in list(self._requests):
            self._requests.fail(request, error)

    # Gateways.

    def on_submit(self, gateway_id: int, submit: Submit) -> None:
        """A request, checked once more: nothing that could break a step gets in."""
        self.stats.num_requests += 1
        try:
            shared = self._requests.check(submit)
        except OctavoError as error:
            self._requests.refuse(gateway_id, submit, error)
            return
        if submit.resumed:
            for sequence in self._requests.resume(gateway_id, submit):
                self._places.enqueue(sequence)
            return
        prompt = [*(shared.token_ids if shared else ()), *submit.prompt_token_ids]
        leader = self._requests.add(gateway_id, submit, prompt).leader
        if shared is None or self._life is None:
            self._places.enqueue(leader)
        else:
            self._life.forks.fork_or_queue(shared.parent, leader, min(shared.num_computed, len(prompt) - 1))

    def on_abort(self, gateway_id: int, abort: Abort) -> None:
        self._requests.abort(gateway_id, abort)

    def on_forget(self, forget: Forget) -> None:
        """Let go of what the request keeps, and keep nothing of it if it is alive."""
        self._requests.forget(forget)

    def on_gateway_lost(self, gateway_id: int) -> None:
        """Its requests end, and nobody is told."""
        self._requests.abort_all_of(gateway_id)

    # The KV manager.

    def on_kv_reply(self, reply: KvReply) -> None:
        """Credits, and the answers to forks and admissions. Raises MessageGapError if a reply is missing."""
        life = self._life
        if life is None:
            raise MessageGapError(f"reply {reply.message_no} of the KV manager, and there is no pool")
        life.pool.account.on_reply(reply)
        for transfer in reply.transfers:
            self.stats.num_transferred_blocks[transfer.direction.name.lower()] += len(transfer.device_ids)
        life.pool.swapping.send(reply.transfers)
        for swapped_out in reply.swapped_out:
            life.relief.on_swapped_out(swapped_out)
        for swapped_in in reply.swapped_in:
            life.admissions.on_swapped_in(swapped_in)
        for forked in reply.forked:
            life.forks.on_forked(forked)
        life.admissions.on_admitted(reply.admitted)
        life.relief.preempt_if_dry()
        if any(answer.verdict is Verdict.LATER for answer in reply.swapped_in) or any(
            answer.wait_reason is WaitReason.NO_BLOCKS for answer in reply.admitted
        ):
            life.relief.make_room_for_next()

    # The worker.

    def on_step_result(self, result: StepResult) -> None:
        """Accept what a step brought. Raises MessageGapError if it is not the oldest step on its way."""
        if self._life is None:
            raise MessageGapError(f"result of step {result.step_id}, and there is no pool")
        self._life.results.accept(result)

    # Sending.

    def advance(self, now: float) -> Outbox:
        """Launch what can be launched, and collect what is to be sent. Call it after every event."""
        outbox = Outbox()
        self._places.expire(now)
        life = self._life
        if life is not None:
            if self.has_worker:
                life.pipeline.launch(outbox.plans, now, has_kvmanager=self.has_kvmanager)
            if self.has_kvmanager:
                life.relief.give_up_overdue(now)
                life.relief.make_way_for_urgent()
                life.admissions.ask_for_waiting()
                outbox.kv_request = self._take_kv_request(life, is_idle=self.has_worker and not outbox.plans)
        outbox.batches = self._requests.take_batches(are_tokens_due=self.oldest_step is not None and self.has_worker)
        if self.num_waiting:
            self.log.head_waits(self._places.waiting.peek(), self._why_head_waits())
        self.log.settle(now)
        self.stats.timeline.settle(now)
        return outbox

    def _take_kv_request(self, life: PoolLife, *, is_idle: bool) -> KvRequest | None:
        """`is_idle`: there is a worker, and nothing to send to it; then a beam may give way if nothing else moves."""
        account, acknowledged_step = life.pool.account, life.pool.steps.last_acknowledged
        credit_target = self._settings.credits_per_sequence * self._num_growing(life)
        request = account.take_request(acknowledged_step, credit_target, is_starving=life.relief.has_starved)
        if request is None and is_idle and life.relief.park_idle_beam():
            request = account.take_request(acknowledged_step, credit_target, is_starving=False)
        return request

    def _num_growing(self, life: PoolLife) -> int:
        """Running sequences that may need more blocks than they have."""
        running = life.pool.running
        if self._settings.reservation == "pages":
            return len(running)
        block_size = life.pool.account.block_size
        return sum(len(one.block_table) * block_size < one.request.max_len for one in running.values())

    def _why_head_waits(self) -> WaitCause:
        if self._life is None or not self.has_kvmanager:
            return WaitCause.POOL_LOST
        return self._life.admissions.what_holds_up
