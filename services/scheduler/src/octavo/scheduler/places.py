"""Where a sequence is: in line, on the device, in host memory, kept, or nowhere any more."""

from __future__ import annotations

from octavo.scheduler.branches import KeptChoices
from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.request_records import WaitCause
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.worker_pool import WorkerPool


class Places:
    """Takes sequences from one place to another, with all that they must give back on the way.

    Owns the waiting line and the kept choices, which outlive a pool.
    """

    def __init__(self, max_num_kept: int, log: RequestLog) -> None:
        self.waiting = WaitingQueue()
        self.kept = KeptChoices(max_num_kept)
        self.now = 0.0
        """Of the last `expire`."""
        self._log = log
        self._pool: WorkerPool | None = None

    def expire(self, now: float) -> None:
        """End waits for a leader, and the keeping of choices, whose time is over."""
        self.now = now
        self.waiting.expire(now)
        for sequence in self.kept.expire(now):
            self.let_go(sequence)

    # A pool comes and goes.

    def enter(self, pool: WorkerPool) -> None:
        """There is a pool, empty."""
        self._pool = pool
        for sequence in self.waiting:
            pool.account.arrive(sequence)

    def lose_pool(self, interrupted: list[Sequence]) -> None:
        """The pool is gone. `interrupted`: all that held or had asked for blocks of it, kept choices aside."""
        self._held.decodes.disband()
        self._pool = None
        for sequence in self.waiting:
            sequence.has_arrived = False
        self.waiting.wake_all()
        for sequence in self.kept.with_blocks:
            sequence.state = SequenceState.FINISHED
        for sequence in interrupted:
            self._log.preempted(sequence, "pool_lost", "recompute", WaitCause.POOL_LOST)
            sequence.drop_table()
            sequence.has_arrived = False
            self.requeue(sequence)

    def arrive_anew(self) -> None:
        """The KV manager knows nothing of those that wait."""
        self.waiting.wake_all()
        for sequence in self.waiting:
            sequence.has_arrived = False
            self._held.account.arrive(sequence)

    @property
    def _held(self) -> WorkerPool:
        assert self._pool is not None, "a sequence holds blocks, and there is no pool"
        return self._pool

    @property
    def holders(self) -> list[Sequence]:
        """The sequences that hold blocks which the KV manager knows of."""
        return [*self._held.running.values(), *self.kept.with_blocks]

    # Into the line.

    def enqueue(self, sequence: Sequence) -> None:
        """Wait in line, with all the tokens there are."""
        self.waiting.push(sequence)
        if self._pool is not None:
            self._pool.account.arrive(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """It holds no blocks now, and waits for some if it needs them."""
        beams = sequence.request.beams
        if sequence.is_aborted:
            sequence.state = SequenceState.FINISHED
            if self._pool is not None:
                self._pool.account.forget(sequence)
        elif beams is not None and beams.has_result(sequence):
            sequence.state = SequenceState.PARKED
        else:
            self.enqueue(sequence)

    def back_to_queue(self, sequence: Sequence) -> None:
        """It had a slot, and got no blocks."""
        self._held.slots.give_back(sequence.slot, is_open=False)
        sequence.drop_table()
        self.requeue(sequence)

    def requeue_swapped(self, sequence: Sequence) -> None:
        """Give up what was saved; it will be computed again."""
        self._log.waits(sequence, WaitCause.BEHIND_OTHERS)
        self._held.swapping.drop(sequence)
        self._held.release(sequence)
        sequence.drop_table()
        self.requeue(sequence)

    # Off the device.

    def leave(self, sequence: Sequence, state: SequenceState) -> None:
        """Give up blocks and slot, to be finished or to wait."""
        pool = self._held
        pool.stop(sequence)
        pool.release(sequence)
        pool.slots.give_back(sequence.slot, sequence.is_open)
        self.waiting.wake(sequence.sequence_id)
        if state is SequenceState.WAITING:
            sequence.drop_table()
            self.requeue(sequence)
        else:
            sequence.state = state

    def swap_out(self, victim: Sequence, num_kept_blocks: int) -> None:
        """Save what a running sequence has computed, but for its first blocks, which stay."""
        pool = self._held
        pool.stop(victim)
        self.waiting.wake(victim.sequence_id)
        pool.swapping.swap_out(victim, num_kept_blocks, pool.steps.last_launched, self.now)

    def drop(self, sequence: Sequence) -> None:
        """Give back what the sequence holds, in whatever state it is."""
        match sequence.state:
            case SequenceState.WAITING:
                self.waiting.discard(sequence)
                if self._pool is not None:
                    self._pool.account.forget(sequence)
            case SequenceState.ADMITTING | SequenceState.FORKING:
                sequence.is_aborted = True
            case SequenceState.RUNNING | SequenceState.LEAVING:
                self.leave(sequence, SequenceState.FINISHED)
            case SequenceState.SWAPPING_OUT | SequenceState.SWAPPED | SequenceState.SWAPPING_IN:
                if self._held.swapping.drop(sequence):
                    self._held.release(sequence)
                    sequence.state = SequenceState.FINISHED
            case SequenceState.PARKED:
                sequence.state = SequenceState.FINISHED
            case SequenceState.KEPT | SequenceState.FINISHED:
                pass

    # Kept choices.

    def keep(self, sequence: Sequence) -> None:
        """It gives up its slot. Its blocks stay, if it has any, until somebody needs them or it expires."""
        if sequence.state in (SequenceState.RUNNING, SequenceState.LEAVING):
            pool = self._held
            pool.stop(sequence)
            pool.slots.give_back(sequence.slot, sequence.is_open)
            self.waiting.wake(sequence.sequence_id)
            sequence.state = SequenceState.KEPT
        else:
            self.drop(sequence)
        for gone in self.kept.keep(sequence, self.now + sequence.request.keep_s):
            self.let_go(gone)

    def let_go(self, sequence: Sequence) -> None:
        """Give up the blocks of a kept choice."""
        if sequence.state is SequenceState.KEPT:
            self._held.release(sequence)
            sequence.state = SequenceState.FINISHED

    def let_go_kept(self, num_blocks: int) -> bool:
        """Take the blocks of kept choices, oldest first, until `num_blocks` or all are given up. False: none had any.

        Their tokens stay.
        """
        has_let_go = False
        for sequence in list(self.kept.with_blocks):
            if has_let_go and num_blocks <= 0:
                break
            has_let_go = True
            num_blocks -= len(sequence.block_table)
            self.let_go(sequence)
        return has_let_go
