"""What is done when blocks or slots run out: who gives way, and what becomes of it."""

from __future__ import annotations

from typing import Literal

from octavo.common.errors import InternalError
from octavo.common.messages.kv import SwappedOut
from octavo.scheduler.admissions import Admissions
from octavo.scheduler.forks import Forks
from octavo.scheduler.places import Places
from octavo.scheduler.policy import choose_victim
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.request_records import WaitCause
from octavo.scheduler.requests import Requests
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.worker_pool import WorkerPool


class Relief:
    """Takes blocks: of kept choices first, then of one sequence that runs, and of swapped ones that are in the way.

    Takes slot and blocks of one that runs for a more urgent one that waits.
    """

    def __init__(
        self,
        preemption: Preemption,
        pool: WorkerPool,
        places: Places,
        requests: Requests,
        forks: Forks,
        admissions: Admissions,
        log: RequestLog,
        stats: SchedulerStats,
    ) -> None:
        self.has_starved = False
        """A decode was left out of the plan that was made last, for want of a block, and nobody has given way since."""
        self._starved: list[Sequence] = []
        """As the log was told."""
        self._leaves_for: Literal["no_blocks", "no_slot"] = "no_blocks"
        """Why the LEAVING sequence does; there is at most one."""
        self._may_swap = True
        """Whether what it has computed may go to host memory."""
        self._preemption = preemption
        self._pool = pool
        self._places = places
        self._requests = requests
        self._forks = forks
        self._admissions = admissions
        self._log = log
        self._stats = stats

    # Preemption.

    def note_starved(self, num_starved: int) -> None:
        """So many decodes were left out of the plan that was made last."""
        self.has_starved = num_starved > 0
        if num_starved or self._starved:
            self._log_starved()

    def _log_starved(self) -> None:
        others, block_size = self._pool.decodes.others.values(), self._pool.account.block_size
        starved = [sequence for sequence in others if sequence.lacks_block(block_size)] if self.has_starved else []
        for sequence in starved:
            if sequence not in self._starved:
                self._log.waits(sequence, WaitCause.NO_CREDIT)
        for sequence in self._starved:
            if sequence not in starved:
                self._log.no_longer_starves(sequence)
        self._starved = starved

    def preempt_if_dry(self) -> None:
        if self.has_starved and self._pool.account.is_dry:
            self._preempt_one()

    def _preempt_one(self) -> None:
        """Take the blocks of a choice that is only kept, else some of one that runs; it goes on later."""
        running, swapping = self._pool.running, self._pool.swapping
        if self._places.let_go_kept(1) or self._is_one_leaving:
            return
        partial = swapping.partial
        if partial is not None:
            num_kept = max(0, len(partial.block_table) - len(running))
            self._swap_rest(partial, num_kept)
            return
        victim = self._preemption.victim(running.values())
        if victim is None:
            return
        if len(running) == 1:
            self._relieve_last(victim)
            return
        self.has_starved = False
        self._preempt(victim, "no_blocks", may_swap=True)

    @property
    def _is_one_leaving(self) -> bool:
        return any(one.state is SequenceState.LEAVING for one in self._pool.running.values())

    def _preempt(self, victim: Sequence, why: Literal["no_blocks", "no_slot"], *, may_swap: bool) -> None:
        self._leaves_for, self._may_swap = why, may_swap
        self._stats.num_preemptions += 1
        victim.num_preemptions += 1
        self._pool.decodes.leave(victim)
        if victim.num_steps_in_flight:
            victim.state = SequenceState.LEAVING
        else:
            self.give_way(victim)

    def make_way_for_urgent(self) -> None:
        """If the first in line lacks a slot, or blocks that less urgent ones hold, one of these gives up its own."""
        if (first := self._admissions.first_without_slot) is not None:
            self._pause_less_urgent(first, "no_slot")
        elif (first := self._admissions.first_without_blocks) is not None:
            if (partial := self._pool.swapping.partial) is not None:
                self._swap_rest(partial, num_kept=0)
            else:
                self._pause_less_urgent(first, "no_blocks", self._admissions.num_missing_blocks(first))

    def _pause_less_urgent(self, first: Sequence, why: Literal["no_blocks", "no_slot"], num_blocks: int = 0) -> None:
        less_urgent = self._preemption.less_urgent(self._pool.running.values(), first, num_blocks)
        if less_urgent is not None and not self._is_one_leaving:
            self._stats.num_paused[why] += 1
            self._preempt(less_urgent, why, may_swap=False)

    def _swap_rest(self, partial: Sequence, num_kept: int) -> None:
        """Of a sequence that is swapped in part."""
        self._pool.swapping.swap_out(partial, num_kept, self._pool.steps.last_launched, partial.left_at)

    def _relieve_last(self, sequence: Sequence) -> None:
        """It is the only one that runs, so no other can give way but swapped ones."""
        if swapped := self._pool.swapping.swapped:  # it may share blocks that stay on the device
            self._give_up_swapped(swapped[-1])
        elif not self._pool.swapping.num_in_transit:
            self._requests.fail(sequence.request, InternalError("the block pool is exhausted by one sequence"))

    def give_way(self, victim: Sequence) -> None:
        """A preempted sequence has no step in flight any more.

        One that makes way for a more urgent one is not swapped: its blocks stay in the prefix cache, or sink from there
        to host memory, as far as the other does not need them, and it waits in its old place in line.
        """
        num_kept = None
        if self._may_swap:
            num_kept = self._preemption.num_kept_blocks(victim, len(self._pool.running), self._pool.account.counts)
        if num_kept is None:
            self._log.preempted(victim, self._leaves_for, "recompute", WaitCause.BEHIND_OTHERS)
            self._stats.num_preemptions_by_kind["recompute"] += 1
            self._places.leave(victim, SequenceState.WAITING)
            return
        num_swapped = len(victim.block_table) - num_kept
        self._log.preempted(victim, "no_blocks", "swap", WaitCause.SWAPPED, num_swapped)
        self._stats.num_preemptions_by_kind["partial_swap" if num_kept else "swap"] += 1
        self._places.swap_out(victim, num_kept)

    def park_idle_beam(self) -> bool:
        """If nothing can move, and sequences wait: take blocks and slot of a beam that only waits for its search."""
        may_move = len(self._pool.steps) or self._admissions.asking or self._forks.asking
        if may_move or not self._pool.account.is_settled or not len(self._places.waiting):
            return False
        beam = choose_victim(
            sequence
            for sequence in self._pool.running.values()
            if sequence.request.beams is not None and sequence.request.beams.has_result(sequence)
        )
        if beam is not None:
            self._stats.num_preemptions += 1
            self._log.preempted(beam, "no_blocks", "recompute", WaitCause.BEHIND_OTHERS)
            self._places.leave(beam, SequenceState.WAITING)
        return beam is not None

    # Swapped sequences.

    def on_swapped_out(self, answer: SwappedOut) -> None:
        refused = self._pool.swapping.on_swapped_out(answer)
        if refused is not None:
            self._stats.num_preemptions_by_kind["recompute"] += 1
            self._places.requeue_swapped(refused)

    def make_room_for_next(self) -> None:
        """If nothing else holds blocks, and who goes next had to wait for some, a swapped sequence is in its way."""
        swapping = self._pool.swapping
        if (
            swapping.swapped
            and not self._places.let_go_kept(1)
            and self._admissions.holds_nothing
            and not swapping.has_transfers
            and self._pool.account.is_at_rest
        ):
            partial, swapped = swapping.partial, swapping.swapped
            if partial is not None and (partial is not swapped[0] or self._admissions.overtakes_swapped):
                self._swap_rest(partial, num_kept=0)
                return
            self._give_up_swapped(swapped[-1])

    def give_up_overdue(self, now: float) -> None:
        """Swapped sequences that have waited too long are computed again."""
        for sequence in self._preemption.overdue(now):
            self._give_up_swapped(sequence)

    def _give_up_swapped(self, sequence: Sequence) -> None:
        self._stats.num_preemptions_by_kind["overdue"] += 1
        self._places.requeue_swapped(sequence)

    def lose_swapped(self) -> None:
        """What host memory holds is lost with the KV manager that knew it."""
        for sequence in list(self._pool.swapping):
            if sequence.slot >= 0:
                self._pool.slots.give_back(sequence.slot, is_open=False)
            self._log.waits(sequence, WaitCause.BEHIND_OTHERS)
            sequence.drop_table()
            self._stats.num_preemptions_by_kind["overdue"] += 1
            self._places.requeue(sequence)
        if self._pool.swapping.forget():
            self._pool.steps.raise_barrier()
