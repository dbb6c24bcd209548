"""Keeps the worker supplied: launches steps as long as the pipeline has room, and measures when it cannot."""

from __future__ import annotations

from octavo.common.messages.kv import Transfer
from octavo.common.messages.step import StepPlan
from octavo.scheduler.admissions import Admissions
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.forks import Forks
from octavo.scheduler.launcher import Selection, launch, select_rows
from octavo.scheduler.places import Places
from octavo.scheduler.relief import Relief
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.sharing_groups import SharingGroups
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.timeline import Stall
from octavo.scheduler.worker_pool import WorkerPool


class Pipeline:
    """At most `pipeline_depth` steps are on their way to the worker. Owns what is known of the present stall."""

    def __init__(
        self,
        settings: CoreSettings,
        max_num_batched_tokens: int,
        pool: WorkerPool,
        places: Places,
        forks: Forks,
        admissions: Admissions,
        relief: Relief,
        stats: SchedulerStats,
    ) -> None:
        self._depth = settings.pipeline_depth
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pool = pool
        self._places = places
        self._forks = forks
        self._admissions = admissions
        self._relief = relief
        self._stats = stats
        self._sharing = SharingGroups(settings.min_shared_blocks)
        self._stall_cause: str | None = None
        self._stall_began = 0.0

    def launch(self, plans: list[StepPlan], now: float, *, has_kvmanager: bool) -> None:
        """Add to `plans` what can be launched. Without a KV manager, blocks that were given up are used again."""
        steps, swapping = self._pool.steps, self._pool.swapping
        has_room = len(steps) < self._depth
        while len(steps) < self._depth:
            if steps.barrier > steps.last_launched:
                self._launch_step([], [], plans, now, is_barrier=True)
                continue
            selection = self._select_rows()
            if selection.num_starved and not has_kvmanager and self._recycle():
                selection = self._select_rows()
            self._relief.note_starved(selection.num_starved)
            has_rows = selection.rows or len(self._pool.decodes)
            if not has_rows and not swapping.needs_plan(is_idle=not len(steps)):
                break
            self._launch_step(selection.rows, swapping.take_transfers(), plans, now)
        if has_kvmanager:
            self._relief.preempt_if_dry()
        if has_room:
            self._note_stall(launched=bool(plans), now=now)

    def _select_rows(self) -> Selection:
        pool = self._pool
        pool.decodes.find_blocks(pool.account)
        budget = self._max_num_batched_tokens - len(pool.decodes)
        return select_rows(pool.decodes.others.values(), pool.account, budget)

    def _launch_step(
        self,
        rows: list[tuple[Sequence, int]],
        transfers: list[Transfer],
        plans: list[StepPlan],
        now: float,
        *,
        is_barrier: bool = False,
    ) -> None:
        steps, decodes = self._pool.steps, self._pool.decodes
        plan, step = launch(
            steps.last_launched + 1,
            rows,
            self._pool.slots,
            self._pool.take_copies(),
            self._sharing,
            now,
            acknowledged_step=steps.last_acknowledged,
            transfers=transfers,
            decodes=None if is_barrier else decodes,
        )
        if step.decodes is not None:
            decodes.end_launch()
        for sequence, _ in rows:
            decodes.enter_if_steady(sequence)
        steps.launched(step)
        plans.append(plan)

    def _recycle(self) -> bool:
        holding = [*self._places.holders, *self._pool.swapping]
        num_made = self._pool.account.recycle(self._pool.steps.last_acknowledged, holding)
        self._stats.num_recycled_blocks += num_made
        return num_made > 0

    def _note_stall(self, *, launched: bool, now: float) -> None:
        """A stall: the pipeline has room, and what would fill it waits for the KV manager."""
        cause = None
        if not launched and len(self._pool.steps) < self._depth:
            cause = self._find_stall_cause()
        if cause == self._stall_cause:
            return
        if self._stall_cause is not None:
            self._stats.stall_s[self._stall_cause] += now - self._stall_began
            self._stats.timeline.stalls.append(Stall(self._stall_began, now, self._stall_cause))
        if cause is not None:
            self._stats.num_stalls[cause] += 1
            self._stall_began = now
        self._stall_cause = cause

    def _find_stall_cause(self) -> str | None:
        if self._relief.has_starved:
            return "credits"
        if self._admissions.asking or self._forks.asking:
            return "admission"
        return "swap" if self._pool.swapping.num_in_transit else None
