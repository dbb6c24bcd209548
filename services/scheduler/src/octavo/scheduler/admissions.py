"""Who asks the KV manager for blocks, in which order, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from octavo.common.errors import PromptTooLongError
from octavo.common.messages.kv import Admitted, SwappedIn, Verdict, WaitReason
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.forks import Forks
from octavo.scheduler.places import Places
from octavo.scheduler.policy import has_prefill_backlog
from octavo.scheduler.queues import place_in_line
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.request_records import WaitCause
from octavo.scheduler.requests import Requests
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.worker_pool import WorkerPool


class Admissions:
    """Owns the ADMITTING sequences, and the gate that an answer LATER shuts."""

    def __init__(
        self,
        settings: CoreSettings,
        max_num_batched_tokens: int,
        pool: WorkerPool,
        places: Places,
        requests: Requests,
        forks: Forks,
        log: RequestLog,
        stats: SchedulerStats,
    ) -> None:
        self._single_flight_timeout_s = settings.single_flight_timeout_s
        self._waits_for_leaders = settings.prefix_cache and settings.single_flight_timeout_s > 0
        self._reserves_slabs = settings.reservation == "slabs"
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pool = pool
        self._places = places
        self._requests = requests
        self._forks = forks
        self._log = log
        self._stats = stats
        self._admitting: dict[int, Sequence] = {}
        self._refused: tuple[tuple[float, int], int] | None = None
        """When the last answer was LATER for want of blocks: whose place in line it was, and how many blocks could be
        had; None: the gate is open."""

    @property
    def asking(self) -> Collection[Sequence]:
        return self._admitting.values()

    @property
    def holds_nothing(self) -> bool:
        """No block is held by or asked for anybody but kept choices and SWAPPED sequences."""
        pool = self._pool
        return not (pool.running or self._forks.asking or self._admitting or pool.swapping.num_in_transit)

    @property
    def what_holds_up(self) -> WaitCause:
        """Why the first in line has not asked."""
        if self._refused is not None:
            return WaitCause.NO_BLOCKS
        return WaitCause.PREFILL_BACKLOG if self._pool.slots.num_free else WaitCause.NO_SLOT

    @property
    def first_without_slot(self) -> Sequence | None:
        """The first in line, if it would ask for its blocks but for want of a slot, and none is about to come free."""
        if self._pool.slots.num_free or self._admitting or not len(self._places.waiting):
            return None
        first = self._first_before_swapped()
        if first is None or not self._open_gate() or self._has_backlog(self._backlog(), first):
            return None
        return first

    @property
    def first_without_blocks(self) -> Sequence | None:
        """The first in line, if there were too few blocks for it, and none is about to come free."""
        account = self._pool.account
        if self._refused is None or self._admitting or account.awaits_blocks or self._open_gate():
            return None
        _, num_allocatable = self._refused
        return self._first_before_swapped() if account.counts.allocatable <= num_allocatable else None

    def num_missing_blocks(self, first: Sequence) -> int:
        """Blocks that `first` would have to be given, at most, beyond those that nobody holds."""
        account, counts = self._pool.account, self._pool.account.counts
        num_positions = first.request.max_len if self._reserves_slabs else len(first.token_ids)
        return -(-num_positions // account.block_size) - counts.allocatable - counts.granted

    @property
    def overtakes_swapped(self) -> bool:
        """Whether the first in line, or one that has asked, goes before all swapped sequences."""
        is_behind = self._pool.swapping.is_behind
        return self._first_before_swapped() is not None or any(map(is_behind, self._admitting.values()))

    def _first_before_swapped(self) -> Sequence | None:
        """The first in line; None if swapped sequences go before it."""
        first = self._places.waiting.peek()
        return first if first is not None and self._pool.swapping.is_behind(first) else None

    # Asking.

    def ask_for_waiting(self) -> None:
        """Ask for blocks for the next in line, as far as slots and the backlog of prompts allow.

        Swapped sequences go before all that are not more urgent: they have work to lose, and their host blocks are to
        come free.
        """
        swapping, waiting, slots = self._pool.swapping, self._places.waiting, self._pool.slots
        if swapping.num_swapped and not self.overtakes_swapped:
            swapping.ask_next(holds_nothing=self.holds_nothing)
        if not len(waiting) or not self._open_gate():
            return
        backlog = self._backlog()
        while slots.num_free:
            sequence = self._first_before_swapped()
            if sequence is None or self._has_backlog(backlog, sequence):
                return
            waiting.pop()
            self._ask(sequence)
            if not sequence.is_tentative:
                backlog.append((sequence.priority, len(sequence.token_ids)))

    def _open_gate(self) -> bool:
        """After an answer LATER: whether it is worth asking again, or for another that has come before that one."""
        if self._refused is None:
            return True
        place, num_allocatable = self._refused
        account, first = self._pool.account, self._places.waiting.peek()
        if (
            account.may_fit_now(num_allocatable)
            or (self.holds_nothing and account.is_settled)
            or (first is not None and place_in_line(first) < place)
        ):
            self._refused = None
            return True
        return False

    def _backlog(self) -> list[tuple[int, int]]:
        """(priority, tokens to compute) of every prompt that has its blocks or has asked for them."""
        running = self._pool.decodes.others.values()
        backlog = [(one.priority, num_left) for one in running if (num_left := one.num_tokens_to_launch) > 1]
        backlog += [(one.priority, len(one.token_ids)) for one in self._admitting.values() if not one.is_tentative]
        backlog += [(one.priority, one.num_tokens_to_launch) for one in self._pool.swapping.arriving]
        return backlog

    def _has_backlog(self, backlog: list[tuple[int, int]], first: Sequence) -> bool:
        """Whether prompts that are not less urgent than the first in line fill the next step."""
        num_tokens_left = (num_left for priority, num_left in backlog if priority <= first.priority)
        return has_prefill_backlog(num_tokens_left, self._max_num_batched_tokens)

    def _ask(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.ADMITTING
        sequence.slot = self._pool.slots.take()
        self._admitting[sequence.sequence_id] = sequence
        self._log.asks(sequence)
        ignores_cache = sequence.request.awaits_prompt_logprobs
        computes_itself = sequence.computes_itself or ignores_cache or not self._waits_for_leaders
        self._pool.account.admit(
            sequence,
            computes_itself=computes_itself,
            ignores_cache=ignores_cache,
            num_table_tokens=sequence.request.max_len if self._reserves_slabs else 0,
        )

    def forget_answers(self) -> None:
        """A new KV manager knows of no admission that was asked for: all are back in line, and the gate is open."""
        for sequence in list(self._admitting.values()):
            self._on_admitted(Admitted(sequence.sequence_id, Verdict.LATER))
        self._refused = None

    # Answers.

    def on_admitted(self, answers: Iterable[Admitted]) -> None:
        """The answers of one reply. Kept choices make room for the first that has to wait."""
        is_blocked = False
        for admitted in answers:
            if admitted.verdict is Verdict.LATER and not is_blocked:
                is_blocked = True
                num_tokens = len(self._admitting[admitted.sequence_id].token_ids)
                num_blocks = -(-num_tokens // self._pool.account.block_size)
                self._places.let_go_kept(num_blocks - self._pool.account.counts.allocatable)
            self._on_admitted(admitted)

    def _on_admitted(self, admitted: Admitted) -> None:
        sequence = self._admitting.pop(admitted.sequence_id)
        match admitted.verdict:
            case Verdict.OK:
                self._refused = None
                self._on_ok(sequence, admitted)
            case Verdict.LATER:
                self._on_later(sequence, admitted)
            case Verdict.NEVER:
                sequence.has_arrived = False
                self._places.back_to_queue(sequence)
                if not sequence.is_aborted:
                    num_tokens = len(sequence.token_ids)
                    error = PromptTooLongError(f"{num_tokens} tokens exceed the whole KV-block pool")
                    self._requests.fail(sequence.request, error)

    def _on_ok(self, sequence: Sequence, admitted: Admitted) -> None:
        pool, request = self._pool, sequence.request
        sequence.take_table(admitted.block_ids, admitted.generations, admitted.num_cached_tokens)
        sequence.num_told_tokens = len(sequence.token_ids)
        sequence.num_published_blocks = admitted.num_cached_tokens // pool.account.block_size
        pool.run(sequence)
        self._log.admitted(sequence, admitted, pool.account.block_size)
        if sequence.is_aborted:
            self._places.leave(sequence, SequenceState.FINISHED)
            return
        if admitted.transfer_id:
            pool.stop(sequence)
            pool.swapping.await_prefix(sequence, admitted.transfer_id)
            self._log.waits(sequence, WaitCause.SWAPPED)
        if not request.has_started:
            self._stats.num_host_prompt_tokens += min(admitted.num_host_tokens, request.num_prompt_tokens)
        self._requests.note_start(request, admitted.num_cached_tokens)

    def _on_later(self, sequence: Sequence, admitted: Admitted) -> None:
        """Too few blocks hold up all; who is hashed later, or waits for a leader, holds up nobody."""
        reason = admitted.wait_reason
        sequence.is_tentative = reason in (WaitReason.HASHING, WaitReason.IN_FLIGHT)
        if reason in (WaitReason.NO_BLOCKS, WaitReason.NONE):
            self._refused = place_in_line(sequence), self._pool.account.counts.allocatable
        self._log.waits(sequence, WaitCause.of(reason))
        leader = self._pool.running.get(admitted.awaited_sequence_id)
        # The leader may have moved on since: then it is worth asking again at once.
        if leader is None or sequence.is_aborted or leader.last_publication_no > sequence.asked_at_publication_no:
            self._places.back_to_queue(sequence)
            return
        self._pool.slots.give_back(sequence.slot, is_open=False)
        sequence.drop_table()
        self._stats.num_single_flight_waits += 1
        self._places.waiting.park(sequence, leader, self._places.now + self._single_flight_timeout_s)

    def on_swapped_in(self, answer: SwappedIn) -> None:
        sequence = self._pool.swapping.on_swapped_in(answer)
        if sequence is None:
            return
        if sequence.is_aborted:
            self._pool.account.release(sequence, self._pool.steps.last_launched)
            if sequence.slot >= 0:
                self._pool.slots.give_back(sequence.slot, is_open=False)
            sequence.state = SequenceState.FINISHED
        else:
            self._log.runs(sequence)
            self._pool.run(sequence)
