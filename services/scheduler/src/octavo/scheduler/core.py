"""The scheduler's core: the life of every request, and the step pipeline of one worker group.

Sans-I/O: messages and the time go in by the `on_*` methods, and `advance` returns what is to be sent. Three counters
tell how far a step is: launched (sent to the worker), acknowledged (its result is here), told (the KV manager knows).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field

from octavo.common.errors import (
    InternalError,
    MessageGapError,
    NotReadyError,
    NumericError,
    OctavoError,
    PromptTooLongError,
    QueueFullError,
)
from octavo.common.messages.generation import (
    Abort,
    ChoiceFinished,
    FinishReason,
    Forget,
    ModelInfo,
    RequestFailed,
    RequestStarted,
    SampledToken,
    Submit,
    TokenBatch,
    TokenLogprobs,
)
from octavo.common.messages.kv import (
    Admitted,
    BlockCopy,
    DeclarePool,
    Forked,
    KvReply,
    KvRequest,
    SwappedIn,
    Transfer,
    Verdict,
    WaitReason,
)
from octavo.common.messages.step import StepPlan, StepResult
from octavo.scheduler.beams import Beams, answer_tokens
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.branches import KeptChoices, SharedTokens, find_shared_tokens
from octavo.scheduler.launcher import LaunchedStep, Selection, launch, select_rows, without_targets
from octavo.scheduler.policy import choose_victim, has_prefill_backlog
from octavo.scheduler.preemption import Preemption, PreemptionSettings
from octavo.scheduler.queues import Slots, WaitingQueue
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.request_records import WaitCause
from octavo.scheduler.sequence import Request, Sequence, SequenceState
from octavo.scheduler.sharing_groups import SharingGroups
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.stopping import Ending, StopRules
from octavo.scheduler.submit_check import check_submit
from octavo.scheduler.swapping import Swapping

_NEVER_FULL = 2**62
_NO_LOGPROBS: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """See `SchedulerConfig` for the meaning of each."""

    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 4096
    max_num_choices: int = 1024
    max_num_kept: int = 256
    pipeline_depth: int = 2
    prefix_cache: bool = True
    credits_per_sequence: int = 2
    preemption: PreemptionSettings = field(default_factory=PreemptionSettings)
    single_flight_timeout_s: float = 5.0
    min_shared_blocks: int = 4
    num_explained_requests: int = 10_000


@dataclass(slots=True)
class Outbox:
    """What is to be sent now, in this order."""

    plans: list[StepPlan] = field(default_factory=list)
    kv_request: KvRequest | None = None
    batches: dict[int, TokenBatch] = field(default_factory=dict)
    """By gateway."""


class SchedulerCore:
    """Owns requests, sequences, queues and the step pipeline.

    Between `pool_lost` and `start` nothing runs; requests wait, with the tokens that they have.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self.stats = SchedulerStats()
        self.log = RequestLog(settings.num_explained_requests)
        self.model: ModelInfo | None = None
        self._settings = settings
        self._requests: dict[tuple[int, int], Request] = {}
        self._waiting = WaitingQueue()
        self._kept = KeptChoices(settings.max_num_kept)
        self._waits_for_leaders = settings.prefix_cache and settings.single_flight_timeout_s > 0
        self._now = 0.0
        self._sequence_ids = itertools.count(1)
        self._arrivals = itertools.count(1)
        self._batches: dict[int, TokenBatch] = {}
        self._is_running = False
        self._now = 0.0
        """Of the last `advance`."""
        self.has_worker = self.has_kvmanager = True
        """Whether there is a link to it. Without a worker nothing is launched; without a KV manager decode goes on with
        the credits in hand and with recycled blocks, and nothing is admitted, preempted or told."""
        self._forget_pool()

    def _forget_pool(self) -> None:
        self._running: dict[int, Sequence] = {}
        """RUNNING and LEAVING sequences, in the order of admission."""
        self._admitting: dict[int, Sequence] = {}
        self._forking: dict[int, Sequence] = {}
        self._in_flight: deque[LaunchedStep] = deque()
        self._copies: list[BlockCopy] = []
        """For the next plan, whatever it runs. A source may have a new owner already, but that one comes with the same
        reply or a later one, so its rows are in that plan or a later one, and copies come before rows."""
        self._last_launched = self._last_acknowledged = 0
        self._barrier_step = 0
        """A step without rows, with whose result all transfers of an earlier KV manager have ended."""
        self._has_starved = False
        self._allocatable_at_later: int | None = None
        self._stall_cause: str | None = None
        self._stall_began = 0.0

    # What a server looks at.

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_parked(self) -> int:
        """Of those that wait, the ones that wait for a block that another sequence computes."""
        return self._waiting.num_parked

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_swapped(self) -> int:
        return sum(1 for _ in self._swapping) if self._is_running else 0

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def account(self) -> BlockAccount | None:
        """The account with the present pool."""
        return self._account if self._is_running else None

    @property
    def oldest_launch_at(self) -> float | None:
        """When the oldest step on its way was launched."""
        return self._in_flight[0].launched_at if self._in_flight else None

    # Pool and worker come and go.

    def start(self, model: ModelInfo, num_blocks: int, max_num_batched_tokens: int) -> None:
        """A worker with closed slots and a KV manager with an empty pool are there.

        `max_num_batched_tokens` is the worker's own limit; a step keeps to the lower of both.
        """
        self._max_num_batched_tokens = min(self._settings.max_num_batched_tokens, max_num_batched_tokens)
        self.model = model
        self._rules = StopRules(frozenset(model.eos_token_ids), model.max_model_len)
        self._account = BlockAccount(num_blocks, model.block_size)
        self._slots = Slots(model.max_num_seqs)
        self._swapping = Swapping(self._account, self._slots)
        self._preemption = Preemption(self._settings.preemption, model.block_size, self._swapping)
        self._sharing = SharingGroups(self._settings.min_shared_blocks)
        self._is_running = True
        self.log.pool_is_back()
        for request in self._requests.values():
            self._rules.apply_to(request)
        for sequence in self._waiting:
            self._account.arrive(sequence)

    def pool_lost(self) -> None:
        """Worker or KV manager is gone: every sequence goes back to the queue with the tokens it has."""
        if not self._is_running:
            return
        self._is_running = False
        self.stats.num_pool_losses += 1
        for sequence in self._waiting:
            sequence.has_arrived = False
        self._waiting.wake_all()
        interrupted = [*self._running.values(), *self._admitting.values(), *self._forking.values(), *self._swapping]
        self._forget_pool()
        for sequence in self._kept.with_blocks:
            sequence.state = SequenceState.FINISHED
        for sequence in interrupted:
            self.log.preempted(sequence, "pool_lost", "recompute", WaitCause.POOL_LOST)
            sequence.drop_table()
            sequence.has_arrived = False
            self._requeue(sequence)

    def declare(self) -> DeclarePool:
        """What a KV manager must be told that knows nothing of the pool, which is as it was.

        Admissions that it has not answered are asked anew, and so are forks of sequences that are still there.
        """
        self.stats.num_declarations += 1
        self._forget_swapped()
        for sequence in list(self._admitting.values()):
            self._on_admitted(Admitted(sequence.sequence_id, Verdict.LATER))
        self._allocatable_at_later = None
        holders = {sequence.sequence_id: sequence for sequence in self._holders()}
        for fork in list(self._account.open_forks.values()):
            parent = holders.get(fork.parent_id)
            if parent is None or parent.num_computed_tokens < fork.num_tokens:
                del self._account.open_forks[fork.child_id]
                self._on_forked(Forked(fork.child_id, Verdict.LATER))
        declaration = self._account.declare(
            self._holders(),
            max(self._last_launched, self._barrier_step),
            self._last_acknowledged,
            publishes=self._settings.prefix_cache,
        )
        for fork in self._account.open_forks.values():
            self._account.ask_fork(fork, holders[fork.parent_id], self._forking[fork.child_id])
        self._waiting.wake_all()
        for sequence in self._waiting:
            sequence.has_arrived = False
            self._account.arrive(sequence)
        return declaration

    def _holders(self) -> list[Sequence]:
        """The sequences that hold blocks which the KV manager knows of."""
        return [*self._running.values(), *self._kept.with_blocks]

    def _forget_swapped(self) -> None:
        """What host memory holds is lost with the KV manager that knew it."""
        for sequence in list(self._swapping):
            if sequence.slot >= 0:
                self._slots.give_back(sequence.slot, is_open=False)
            self.log.waits(sequence, WaitCause.BEHIND_OTHERS)
            sequence.drop_table()
            self.stats.num_preemptions_by_kind["overdue"] += 1
            self._requeue(sequence)
        if self._swapping.forget():
            self._barrier_step = self._last_launched + 1

    def restart_step_clock(self, now: float) -> None:
        """The worker is back: the time of its steps on their way counts from now."""
        for step in self._in_flight:
            step.launched_at = now

    def fail_all(self, error: OctavoError) -> None:
        """End every request in `error`."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    # Gateways.

    def on_submit(self, gateway_id: int, submit: Submit) -> None:
        """A new request, checked once more: nothing that could break a step gets in."""
        self.stats.num_requests += 1
        try:
            model, shared = self._check(submit)
        except OctavoError as error:
            self.stats.num_failed_requests += 1
            self._batch(gateway_id).failed.append(RequestFailed(submit.request_no, error.reason, error.message))
            self.log.refused(submit, error)
            return
        prompt = [*(shared.token_ids if shared else ()), *submit.prompt_token_ids]
        request = Request(
            gateway_id=gateway_id,
            request_no=submit.request_no,
            request_id=submit.request_id,
            params=submit.params,
            num_prompt_tokens=len(prompt),
            salt=submit.cache_salt,
            priority=submit.priority,
            keep_s=submit.keep_s,
            has_fanned_out=submit.params.n == 1,
        )
        self._rules.apply_to(request)
        leader = self._new_sequence(request, 0, next(self._arrivals), prompt)
        request.live = dict.fromkeys(range(submit.params.n))
        request.leader = leader
        if submit.params.beam_width:
            request.has_fanned_out = leader.is_host_fed = True
            request.beams = Beams(self._rules.beam_group(request), leader, model.vocab_size)
        else:
            request.live[0] = leader
        self._requests[gateway_id, submit.request_no] = request
        self.stats.num_prompt_tokens += len(prompt)
        if shared is None:
            self._enqueue(leader)
        else:
            self._fork_or_queue(shared.parent, leader, min(shared.num_computed, len(prompt) - 1))

    def on_abort(self, gateway_id: int, abort: Abort) -> None:
        request = self._requests.get((gateway_id, abort.request_no))
        if request is None:
            return
        for choice_index in list(request.live) if abort.choice_index is None else [abort.choice_index]:
            if choice_index in request.live:
                self.stats.num_aborted_choices += 1
                sequence, num_output_tokens = request.live[choice_index], abort.num_output_tokens
                if sequence is not None and num_output_tokens is not None:
                    sequence.cut_output(num_output_tokens)
                is_kept = num_output_tokens is not None
                self._end_choice(request, choice_index, Ending(FinishReason.ABORT), is_kept=is_kept)

    def on_forget(self, forget: Forget) -> None:
        """Let go of what the request keeps, and keep nothing of it if it is alive."""
        for request in self._requests.values():
            if request.request_id == forget.request_id and request.salt == forget.cache_salt:
                request.keep_s = 0.0
        for sequence in self._kept.forget(forget.cache_salt, forget.request_id):
            self._let_go(sequence)

    def on_gateway_lost(self, gateway_id: int) -> None:
        """Its requests end, and nobody is told."""
        for request in [request for request in self._requests.values() if request.gateway_id == gateway_id]:
            self.on_abort(gateway_id, Abort(request.request_no))
        self._batches.pop(gateway_id, None)

    def _check(self, submit: Submit) -> tuple[ModelInfo, SharedTokens | None]:
        """The model, and what the request shares with the choice that it branches from."""
        if self.model is None:
            raise NotReadyError("no worker has loaded a model yet")
        if (num_waiting := len(self._waiting)) >= self._settings.max_num_waiting:
            raise QueueFullError(f"{num_waiting} sequences wait; try again later")
        shared = None
        if submit.branch is not None:
            shared = find_shared_tokens(submit.cache_salt, submit.branch, self._requests.values(), self._kept)
        num_shared_tokens = len(shared.token_ids) if shared else 0
        check_submit(submit, num_shared_tokens, self.model, self._settings.max_num_choices)
        return self.model, shared

    # The KV manager.

    def on_kv_reply(self, reply: KvReply) -> None:
        """Credits, and the answers to forks and admissions. Raises MessageGapError if a reply is missing."""
        self._account.on_reply(reply)
        for transfer in reply.transfers:
            self.stats.num_transferred_blocks[transfer.direction.name.lower()] += len(transfer.device_ids)
        self._swapping.send(reply.transfers)
        for swapped_out in reply.swapped_out:
            refused = self._swapping.on_swapped_out(swapped_out)
            if refused is not None:
                self.stats.num_preemptions_by_kind["recompute"] += 1
                self._requeue_swapped(refused)
        for swapped_in in reply.swapped_in:
            self._on_swapped_in(swapped_in)
        for forked in reply.forked:
            if forked.verdict is not Verdict.OK:
                self._let_go_kept(1)
            self._on_forked(forked)
        is_blocked = False
        for admitted in reply.admitted:
            if admitted.verdict is Verdict.LATER and not is_blocked:
                is_blocked = True
                num_tokens = len(self._admitting[admitted.sequence_id].token_ids)
                num_blocks = -(-num_tokens // self._account.block_size)
                self._let_go_kept(num_blocks - self._account.counts.allocatable)
            self._on_admitted(admitted)
        if self._has_starved and self._account.is_dry:
            self._preempt_one()
        if any(answer.verdict is Verdict.LATER for answer in reply.swapped_in):
            self._make_room_for_swapped()

    def _on_swapped_in(self, answer: SwappedIn) -> None:
        sequence = self._swapping.on_swapped_in(answer)
        if sequence is None:
            return
        if sequence.is_aborted:
            self._account.release(sequence, self._last_launched)
            if sequence.slot >= 0:
                self._slots.give_back(sequence.slot, is_open=False)
            sequence.state = SequenceState.FINISHED
        else:
            self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        """All its blocks hold what they should."""
        self.log.runs(sequence)
        sequence.state = SequenceState.RUNNING
        self._running[sequence.sequence_id] = sequence

    def _make_room_for_swapped(self) -> None:
        """If nothing else holds blocks and the first swapped sequence still has to wait, another one is in its way."""
        if (
            self._swapping.swapped
            and not self._let_go_kept(1)
            and self._holds_nothing
            and not self._swapping.has_transfers
            and self._account.is_at_rest
        ):
            partial, swapped = self._swapping.partial, self._swapping.swapped
            if partial not in (None, swapped[0]):
                self._swapping.swap_out(partial, 0, self._last_launched, partial.left_at)
                return
            self.stats.num_preemptions_by_kind["overdue"] += 1
            self._requeue_swapped(swapped[-1])

    @property
    def _holds_nothing(self) -> bool:
        return not (self._running or self._forking or self._admitting or self._swapping.num_in_transit)

    def _requeue_swapped(self, sequence: Sequence) -> None:
        """Give up what was saved; it will be computed again."""
        self.log.waits(sequence, WaitCause.BEHIND_OTHERS)
        self._swapping.drop(sequence)
        self._release(sequence)
        sequence.drop_table()
        self._requeue(sequence)

    def _on_forked(self, forked: Forked) -> None:
        child = self._forking.pop(forked.child_id)
        if forked.verdict is Verdict.OK:
            child.take_table(forked.block_ids, forked.generations, child.num_shared_tokens)
            if forked.copy is not None:
                self._copies.append(forked.copy)
            self._running[child.sequence_id] = child
            if child.is_aborted:
                self._leave(child, SequenceState.FINISHED)
            else:
                self.log.runs(child)
                self._note_start(child.request, child.num_shared_tokens)
        else:
            self.log.waits(child, WaitCause.NO_BLOCKS)
            self._back_to_queue(child)

    def _on_admitted(self, admitted: Admitted) -> None:
        sequence = self._admitting.pop(admitted.sequence_id)
        request = sequence.request
        match admitted.verdict:
            case Verdict.OK:
                self._allocatable_at_later = None
                sequence.take_table(admitted.block_ids, admitted.generations, admitted.num_cached_tokens)
                sequence.num_told_tokens = len(sequence.token_ids)
                sequence.num_published_blocks = admitted.num_cached_tokens // self._account.block_size
                self._running[sequence.sequence_id] = sequence
                self.log.admitted(sequence, admitted, self._account.block_size)
                if sequence.is_aborted:
                    self._leave(sequence, SequenceState.FINISHED)
                    return
                if admitted.transfer_id:
                    del self._running[sequence.sequence_id]
                    self._swapping.await_prefix(sequence, admitted.transfer_id)
                    self.log.waits(sequence, WaitCause.SWAPPED)
                if not request.has_started:
                    num_host_tokens = min(admitted.num_host_tokens, request.num_prompt_tokens)
                    self.stats.num_host_prompt_tokens += num_host_tokens
                self._note_start(request, admitted.num_cached_tokens)
            case Verdict.LATER:
                self._on_later(sequence, admitted)
            case Verdict.NEVER:
                sequence.has_arrived = False
                self._back_to_queue(sequence)
                if not sequence.is_aborted:
                    num_tokens = len(sequence.token_ids)
                    self._fail(request, PromptTooLongError(f"{num_tokens} tokens exceed the whole KV-block pool"))

    def _on_later(self, sequence: Sequence, admitted: Admitted) -> None:
        """Too few blocks hold up all; who is hashed later, or waits for a leader, holds up nobody."""
        reason = admitted.wait_reason
        sequence.is_tentative = reason in (WaitReason.HASHING, WaitReason.IN_FLIGHT)
        if reason in (WaitReason.NO_BLOCKS, WaitReason.NONE):
            self._allocatable_at_later = self._account.counts.allocatable
        self.log.waits(sequence, WaitCause.of(reason))
        leader = self._running.get(admitted.awaited_sequence_id)
        # The leader may have moved on since: then it is worth asking again at once.
        if leader is None or sequence.is_aborted or leader.last_publication_no > sequence.asked_at_publication_no:
            self._back_to_queue(sequence)
            return
        self._slots.give_back(sequence.slot, is_open=False)
        sequence.drop_table()
        self.stats.num_single_flight_waits += 1
        self._waiting.park(sequence, leader, self._now + self._settings.single_flight_timeout_s)

    def _note_start(self, request: Request, num_cached_tokens: int) -> None:
        """Tell the gateway, the first time that a sequence of the request gets its blocks."""
        if request.has_started:
            return
        request.has_started = True
        num_cached = min(num_cached_tokens, request.num_prompt_tokens)
        self.stats.num_cached_prompt_tokens += num_cached
        started = RequestStarted(request.request_no, num_cached, request.num_prompt_tokens)
        self._batch(request.gateway_id).started.append(started)

    def _back_to_queue(self, sequence: Sequence) -> None:
        """It got no blocks."""
        self._slots.give_back(sequence.slot, is_open=False)
        sequence.drop_table()
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """It holds no blocks now, and waits for some if it needs them."""
        beams = sequence.request.beams
        if sequence.is_aborted:
            sequence.state = SequenceState.FINISHED
            self._account.forget(sequence)
        elif beams is not None and beams.has_result(sequence):
            sequence.state = SequenceState.PARKED
        else:
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        """Wait in line, with all the tokens there are."""
        self._waiting.push(sequence)
        if self._is_running:
            self._account.arrive(sequence)

    def _admit_waiting(self) -> None:
        """Ask for blocks for the next in line, as far as slots and the backlog of prompts allow.

        Swapped sequences go first: they have work to lose, and their host blocks are to come free.
        """
        if self._swapping.num_swapped:
            self._swapping.ask_next(holds_nothing=self._holds_nothing)
        if self._swapping.num_swapped or not len(self._waiting):
            return
        if self._allocatable_at_later is not None:
            if not (
                self._account.may_fit_now(self._allocatable_at_later)
                or (self._holds_nothing and self._account.is_settled)
            ):
                return
            self._allocatable_at_later = None
        budget = self._max_num_batched_tokens
        backlog = [num_left for sequence in self._running.values() if (num_left := sequence.num_tokens_to_launch) > 1]
        backlog += [len(one.token_ids) for one in self._admitting.values() if not one.is_tentative]
        backlog += [sequence.num_tokens_to_launch for sequence in self._swapping.arriving]
        while self._slots.num_free and not has_prefill_backlog(backlog, budget):
            sequence = self._waiting.peek()
            if sequence is None:
                return
            self._waiting.pop()
            sequence.state = SequenceState.ADMITTING
            sequence.slot = self._slots.take()
            self._admitting[sequence.sequence_id] = sequence
            self.log.asks(sequence)
            computes_itself = sequence.computes_itself or not self._waits_for_leaders
            self._account.admit(sequence, computes_itself=computes_itself)
            if not sequence.is_tentative:
                backlog.append(len(sequence.token_ids))

    def _preempt_one(self) -> None:
        """Take the blocks of a choice that is only kept, else some of one that runs; it goes on later."""
        if self._let_go_kept(1) or any(sequence.state is SequenceState.LEAVING for sequence in self._running.values()):
            return
        partial = self._swapping.partial
        if partial is not None:
            num_kept = max(0, len(partial.block_table) - len(self._running))
            self._swapping.swap_out(partial, num_kept, self._last_launched, partial.left_at)
            return
        victim = self._preemption.victim(self._running.values())
        if victim is None:
            return
        if len(self._running) == 1:
            if swapped := self._swapping.swapped:  # it may share blocks that stay on the device
                self.stats.num_preemptions_by_kind["overdue"] += 1
                self._requeue_swapped(swapped[-1])
                return
            if self._swapping.num_in_transit:
                return
            self._fail(victim.request, InternalError("the block pool is exhausted by one sequence"))
            return
        self.stats.num_preemptions += 1
        victim.num_preemptions += 1
        self._has_starved = False
        if victim.num_steps_in_flight:
            victim.state = SequenceState.LEAVING
        else:
            self._give_way(victim)

    def _give_way(self, victim: Sequence) -> None:
        """A preempted sequence has no step in flight any more."""
        num_kept = self._preemption.num_kept_blocks(victim, len(self._running), self._account.counts)
        if num_kept is None:
            self.log.preempted(victim, "no_blocks", "recompute", WaitCause.BEHIND_OTHERS)
            self.stats.num_preemptions_by_kind["recompute"] += 1
            self._leave(victim, SequenceState.WAITING)
            return
        self.log.preempted(victim, "no_blocks", "swap", WaitCause.SWAPPED)
        self.stats.num_preemptions_by_kind["partial_swap" if num_kept else "swap"] += 1
        del self._running[victim.sequence_id]
        self._waiting.wake(victim.sequence_id)
        self._swapping.swap_out(victim, num_kept, self._last_launched, self._now)

    def _leave(self, sequence: Sequence, state: SequenceState) -> None:
        """Give up blocks and slot, to be finished or to wait."""
        del self._running[sequence.sequence_id]
        self._release(sequence)
        self._slots.give_back(sequence.slot, sequence.is_open)
        self._waiting.wake(sequence.sequence_id)
        if state is SequenceState.WAITING:
            sequence.drop_table()
            self._requeue(sequence)
        else:
            sequence.state = state

    def _let_go_kept(self, num_blocks: int) -> bool:
        """Take the blocks of kept choices, oldest first, until `num_blocks` or all are given up. False: none had any.

        Their tokens stay.
        """
        has_let_go = False
        for sequence in list(self._kept.with_blocks):
            if has_let_go and num_blocks <= 0:
                break
            has_let_go = True
            num_blocks -= len(sequence.block_table)
            self._let_go(sequence)
        return has_let_go

    def _let_go(self, sequence: Sequence) -> None:
        """Give up the blocks of a kept choice."""
        if sequence.state is SequenceState.KEPT:
            self._release(sequence)
            sequence.state = SequenceState.FINISHED

    def _release(self, sequence: Sequence) -> None:
        if self._copies:
            self._copies = without_targets(self._copies, sequence.block_table)
        self._account.release(sequence, self._last_launched)

    def _park_idle_beam(self) -> bool:
        """Nothing can move, and sequences wait: take blocks and slot of a beam that only waits for its search."""
        may_move = self._in_flight or self._admitting or self._forking or not self._account.is_settled
        if may_move or not (self.has_worker and len(self._waiting)):
            return False
        beam = choose_victim(
            sequence
            for sequence in self._running.values()
            if sequence.request.beams is not None and sequence.request.beams.has_result(sequence)
        )
        if beam is not None:
            self.stats.num_preemptions += 1
            self.log.preempted(beam, "no_blocks", "recompute", WaitCause.BEHIND_OTHERS)
            self._leave(beam, SequenceState.WAITING)
        return beam is not None

    # The worker.

    def on_step_result(self, result: StepResult) -> None:
        """Accept what a step brought. Raises MessageGapError if it is not the oldest step on its way."""
        if not self._in_flight or result.step_id != self._in_flight[0].step_id:
            raise MessageGapError(f"result of step {result.step_id} was not the next one")
        step = self._in_flight.popleft()
        self._last_acknowledged = step.step_id
        self.stats.num_steps += 1
        self.stats.worker_busy_s += result.compute_us * 1e-6
        self.stats.worker_idle_s += result.idle_us * 1e-6
        if result.finished_transfers or step.num_prefill_tokens:
            self._take_measures(step, result)
        token_ids, logprobs = result.token_ids, result.logprobs
        block_size = self._account.block_size if self._settings.prefix_cache else _NEVER_FULL
        end_sample = 0
        for sequence, end, num_samples in step.rows:
            begin_sample, end_sample = end_sample, end_sample + num_samples
            sequence.num_steps_in_flight -= 1
            if sequence.state in (SequenceState.FINISHED, SequenceState.KEPT):
                self.stats.num_wasted_rows += 1
                continue
            sequence.num_computed_tokens = end
            if end >= (sequence.num_published_blocks + 1) * block_size:
                self._account.publish(sequence)
                self._waiting.wake(sequence.sequence_id)
            if num_samples == 1 and not logprobs and (token_id := token_ids[begin_sample]) >= 0:
                sequence.num_pending_samples -= 1
                self._accept_token(sequence, token_id, None)
            elif num_samples:
                row_logprobs = logprobs[begin_sample:end_sample] if logprobs else _NO_LOGPROBS
                self._accept_samples(sequence, token_ids[begin_sample:end_sample], row_logprobs)
            if sequence.state is SequenceState.LEAVING and not sequence.num_steps_in_flight:
                self._give_way(sequence)

    def _take_measures(self, step: LaunchedStep, result: StepResult) -> None:
        """What the step tells of rates, and of copies that sequences wait for."""
        finished = result.finished_transfers if result.step_id > self._barrier_step else []
        ready, num_copied = self._swapping.on_finished(finished)
        self._preemption.cost.on_step(result, step.num_prefill_tokens, step.num_tokens, num_copied)
        for sequence in ready:
            self._run(sequence)

    def _accept_samples(
        self, sequence: Sequence, token_ids: list[int], logprobs: Sequence_[TokenLogprobs | None]
    ) -> None:
        sequence.num_pending_samples -= 1
        if -1 in token_ids:
            self._fail(sequence.request, NumericError("the model gave logits that are not finite"))
        elif sequence.request.beams is not None:
            self._on_beam_result(sequence, sequence.request.beams, logprobs[0] if logprobs else None)
        elif sequence.request.has_fanned_out:
            self._accept_token(sequence, token_ids[0], logprobs[0] if logprobs else None)
        else:
            self._fan_out(sequence, token_ids, logprobs)

    def _accept_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Append and send on a sampled token. False if the sequence ends with it."""
        sequence.token_ids.append(token_id)
        if sequence.awaits_token:
            sequence.awaits_token = False
            self.log.token_came(sequence)
        request = sequence.request
        self.stats.num_output_tokens += 1
        batch = self._batches.get(request.gateway_id) or self._batch(request.gateway_id)
        batch.tokens.append(SampledToken(request.request_no, sequence.choice_index, token_id, logprobs))
        if token_id not in request.ending_ids and len(sequence.token_ids) < request.max_len:
            return True
        ending = self._rules.ending(sequence)
        assert ending is not None
        self._end_choice(request, sequence.choice_index, ending, is_kept=True)
        return False

    def _fan_out(self, leader: Sequence, token_ids: list[int], logprobs: Sequence_[TokenLogprobs | None]) -> None:
        """The prompt's last row has drawn the first token of every choice: each gets a sequence of its own."""
        request = leader.request
        request.has_fanned_out = True
        prompt = leader.token_ids[:]
        for choice_index in sorted(request.live.keys() - {0}):
            child = self._new_sequence(request, choice_index, leader.arrival_no, prompt[:])
            child.state = SequenceState.FORKING
            request.live[choice_index] = child
            if self._accept_token(child, token_ids[choice_index], logprobs[choice_index] if logprobs else None):
                self._fork_or_queue(leader, child, request.num_prompt_tokens)
        if 0 in request.live:
            self._accept_token(leader, token_ids[0], logprobs[0] if logprobs else None)
        elif leader.state is not SequenceState.FINISHED:
            self._leave(leader, SequenceState.FINISHED)

    def _fork_or_queue(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """A child shares its parent's first `num_tokens` positions if the parent holds blocks and a slot is free.

        Else it waits like a preempted sequence.
        """
        has_blocks = parent.state in (SequenceState.RUNNING, SequenceState.LEAVING, SequenceState.KEPT)
        if num_tokens < 1 or not has_blocks or not self._slots.num_free:
            self._enqueue(child)
            return
        self.log.waits(child, WaitCause.KV_ANSWER)
        child.slot = self._slots.take()
        child.state = SequenceState.FORKING
        self._forking[child.sequence_id] = child
        self._account.fork(parent, child, num_tokens)

    def _on_beam_result(self, beam: Sequence, beams: Beams, likeliest: TokenLogprobs | None) -> None:
        """Move the beams on, once all have their results. Blocks of dropped ones go after those of forks are shared."""
        request = beam.request
        if likeliest is None:
            self._fail(request, InternalError("the worker gave no log-probabilities to a beam search"))
            return
        if not beams.take_result(beam, likeliest):
            return
        moves = beams.move(lambda token_ids: self._new_beam(request, token_ids))
        for sequence in moves.dropped:
            self.log.dropped(sequence)
            self._drop(sequence)
        for parent, child in moves.forked:
            self._fork_or_queue(parent, child, parent.num_computed_tokens)
        for sequence in moves.continued:
            if sequence.state is SequenceState.PARKED:
                self._enqueue(sequence)
        if beams.group.is_over:
            self._send_answers(request, beams)

    def _new_beam(self, request: Request, token_ids: list[int]) -> Sequence:
        beam = self._new_sequence(request, 0, request.leader.arrival_no, token_ids)
        beam.is_host_fed = True
        return beam

    def _send_answers(self, request: Request, beams: Beams) -> None:
        """The search is over: its best answers are the choices."""
        prompt = request.leader.token_ids[: request.num_prompt_tokens]
        batch = self._batch(request.gateway_id)
        for choice_index, answer in enumerate(beams.group.answers[: request.params.n]):
            if choice_index not in request.live:
                continue
            tokens = answer_tokens(request, choice_index, answer)
            self.stats.num_output_tokens += len(tokens)
            batch.tokens.extend(tokens)
            sequence = self._new_sequence(request, choice_index, request.leader.arrival_no, prompt[:])
            sequence.token_ids += [token.token_id for token in tokens]
            sequence.state = SequenceState.FINISHED
            self.log.token_came(sequence)
            request.live[choice_index] = sequence
            ending = self._rules.ending(sequence)
            self._end_choice(request, choice_index, ending or Ending(FinishReason.LENGTH), is_kept=True)

    # Endings.

    def _new_sequence(self, request: Request, choice_index: int, arrival_no: int, token_ids: list[int]) -> Sequence:
        sequence = Sequence(next(self._sequence_ids), request, choice_index, arrival_no, token_ids)
        self.log.arrived(sequence)
        return sequence

    def _end_choice(self, request: Request, choice_index: int, ending: Ending, *, is_kept: bool = False) -> None:
        """`is_kept`: it can be branched from afterwards, if the request asks for that."""
        sequence = request.live.pop(choice_index)
        if sequence is not None:
            goes_on = bool(request.live) and not request.has_fanned_out
            self.log.choice_ended(sequence, ending.reason, goes_on=goes_on)
        self._batch(request.gateway_id).finished.append(
            ChoiceFinished(request.request_no, choice_index, ending.reason, ending.stop_token_id)
        )
        if not request.live:
            del self._requests[request.gateway_id, request.request_no]
            self.log.ended(request)
            if not request.has_fanned_out:
                sequence = request.leader
            for beam in request.beams.sequences if request.beams is not None else ():
                self._drop(beam)
        elif not request.has_fanned_out:
            return
        if sequence is None:
            return
        if is_kept and request.keep_s > 0:
            self._keep(sequence)
        else:
            self._drop(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """It gives up its slot. Its blocks stay, if it has any, until somebody needs them or it expires."""
        if sequence.state in (SequenceState.RUNNING, SequenceState.LEAVING):
            del self._running[sequence.sequence_id]
            self._slots.give_back(sequence.slot, sequence.is_open)
            self._waiting.wake(sequence.sequence_id)
            sequence.state = SequenceState.KEPT
        else:
            self._drop(sequence)
        for gone in self._kept.keep(sequence, self._now + sequence.request.keep_s):
            self._let_go(gone)

    def _drop(self, sequence: Sequence) -> None:
        """Give back what the sequence holds, in whatever state it is."""
        match sequence.state:
            case SequenceState.WAITING:
                self._waiting.discard(sequence)
                if self._is_running:
                    self._account.forget(sequence)
            case SequenceState.ADMITTING | SequenceState.FORKING:
                sequence.is_aborted = True
            case SequenceState.RUNNING | SequenceState.LEAVING:
                self._leave(sequence, SequenceState.FINISHED)
            case SequenceState.SWAPPING_OUT | SequenceState.SWAPPED | SequenceState.SWAPPING_IN:
                if self._swapping.drop(sequence):
                    self._release(sequence)
                    sequence.state = SequenceState.FINISHED
            case SequenceState.PARKED:
                sequence.state = SequenceState.FINISHED
            case SequenceState.KEPT | SequenceState.FINISHED:
                pass

    def _fail(self, request: Request, error: OctavoError) -> None:
        self.stats.num_failed_requests += 1
        self.log.ended(request, error)
        del self._requests[request.gateway_id, request.request_no]
        for sequence in request.sequences:
            self._drop(sequence)
        self._batch(request.gateway_id).failed.append(RequestFailed(request.request_no, error.reason, error.message))

    def _batch(self, gateway_id: int) -> TokenBatch:
        return self._batches.setdefault(gateway_id, TokenBatch())

    # Sending.

    def advance(self, now: float) -> Outbox:
        """Launch what can be launched, and collect what is to be sent. Call it after every event."""
        outbox = Outbox()
        self._now = now
        self._waiting.expire(now)
        for sequence in self._kept.expire(now):
            self._let_go(sequence)
        if self._is_running:
            if self.has_worker:
                self._launch(outbox.plans, now)
            if self.has_kvmanager:
                for sequence in self._preemption.overdue(now):
                    self.stats.num_preemptions_by_kind["overdue"] += 1
                    self._requeue_swapped(sequence)
                self._admit_waiting()
                target = self._settings.credits_per_sequence * len(self._running)
                outbox.kv_request = self._account.take_request(
                    self._last_acknowledged, target, is_starving=self._has_starved
                )
                if outbox.kv_request is None and not outbox.plans and self._park_idle_beam():
                    outbox.kv_request = self._account.take_request(self._last_acknowledged, target, is_starving=False)
        outbox.batches, self._batches = self._batches, {}
        if len(self._waiting):
            self.log.head_waits(self._waiting.peek(), self._why_head_waits())
        self.log.settle(now)
        return outbox

    def _why_head_waits(self) -> WaitCause:
        if not (self._is_running and self.has_kvmanager):
            return WaitCause.POOL_LOST
        if self._allocatable_at_later is not None:
            return WaitCause.NO_BLOCKS
        return WaitCause.PREFILL_BACKLOG if self._slots.num_free else WaitCause.NO_SLOT

    def _launch(self, plans: list[StepPlan], now: float) -> None:
        has_room = len(self._in_flight) < self._settings.pipeline_depth
        while len(self._in_flight) < self._settings.pipeline_depth:
            if self._barrier_step > self._last_launched:
                self._launch_step([], [], plans, now)
                continue
            selection = self._select_rows()
            if selection.num_starved and not self.has_kvmanager and self._recycle():
                selection = self._select_rows()
            self._has_starved = selection.num_starved > 0
            if not selection.rows and not self._swapping.needs_plan(is_idle=not self._in_flight):
                break
            self._launch_step(selection.rows, self._swapping.take_transfers(), plans, now)
        if self._has_starved and self._account.is_dry and self.has_kvmanager:
            self._preempt_one()
        if has_room:
            self._note_stall(launched=bool(plans), now=now)

    def _launch_step(
        self, rows: list[tuple[Sequence, int]], transfers: list[Transfer], plans: list[StepPlan], now: float
    ) -> None:
        self._last_launched += 1
        plan, step = launch(
            self._last_launched,
            rows,
            self._slots,
            self._copies,
            self._sharing,
            now,
            acknowledged_step=self._last_acknowledged,
            transfers=transfers,
        )
        self._copies = []
        self._in_flight.append(step)
        plans.append(plan)

    def _recycle(self) -> bool:
        holding = [*self._holders(), *self._swapping]
        num_made = self._account.recycle(self._last_acknowledged, holding)
        self.stats.num_recycled_blocks += num_made
        return num_made > 0

    def _select_rows(self) -> Selection:
        return select_rows(self._running.values(), self._account, self._max_num_batched_tokens)

    def _note_stall(self, *, launched: bool, now: float) -> None:
        """A stall: the pipeline has room, and what would fill it waits for the KV manager."""
        cause = None
        if not launched and len(self._in_flight) < self._settings.pipeline_depth:
            cause = (
                "credits"
                if self._has_starved
                else "admission"
                if self._admitting or self._forking
                else "swap"
                if self._swapping.num_in_transit
                else None
            )
        if cause == self._stall_cause:
            return
        if self._stall_cause is not None:
            self.stats.stall_s[self._stall_cause] += now - self._stall_began
        if cause is not None:
            self.stats.num_stalls[cause] += 1
            self._stall_began = now
        self._stall_cause = cause
