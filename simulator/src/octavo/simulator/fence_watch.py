"""Sees for itself that no block is handed out anew while a step that may touch it has still to run."""

from __future__ import annotations

from octavo.common.messages.kv import KvReply
from octavo.common.messages.step import StepPlan


class FenceWatch:
    """Knows the plans that were sent and have not run, and the blocks of their tables and copies.

    The source of a copy may have a new owner: that one's rows come in the same plan or a later one, after the copy.
    The watch reads plans and replies only; what scheduler and KV manager believe of fences is not asked.
    """

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """The worker's pool is a new one."""
        self._tables: dict[int, list[int]] = {}
        """By slot, as the last plan left them."""
        self._touched: dict[int, set[int]] = {}
        """By step that has not run."""
        self._last_step = 0

    def sent(self, plan: StepPlan) -> None:
        """A plan was launched; one that is sent again is known."""
        if plan.step_id <= self._last_step:
            return
        self._last_step = plan.step_id
        for slot in plan.closed_slots:
            del self._tables[slot]
        for opened in plan.opened_slots:
            self._tables[opened.slot] = []
        for delta in plan.table_deltas:
            self._tables[delta.slot].extend(delta.block_ids)
        touched = {copy.target_id for copy in plan.copies}
        self._touched[plan.step_id] = touched.union(*(self._tables[slot] for slot in plan.slots))

    def ran(self, step_id: int) -> None:
        self._touched.pop(step_id, None)

    def check(self, reply: KvReply, block_size: int) -> None:
        """Raises AssertionError if the reply hands out a block that a step on its way may touch."""
        if not self._touched:
            return
        fresh = [block_id for block_id, _ in reply.credits]
        for answer in reply.admitted:
            fresh += answer.block_ids[answer.num_cached_tokens // block_size :]
        fresh += [forked.copy.target_id for forked in reply.forked if forked.copy is not None]
        for step_id, touched in self._touched.items():
            if early := touched.intersection(fresh):
                raise AssertionError(f"blocks {sorted(early)} are handed out before step {step_id} has run")
