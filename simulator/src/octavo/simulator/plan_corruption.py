"""Plans that are not as their scheduler made them, which a worker has to refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from octavo.common.messages.step import StepPlan, TableDelta


def with_old_generation(plan: StepPlan, generation_of: Callable[[int], int]) -> StepPlan | None:
    """The plan with the first block that the worker knows at an older generation; None if it names none."""
    for place, delta in enumerate(plan.table_deltas):
        for index, block_id in enumerate(delta.block_ids):
            if (known := generation_of(block_id)) > 1:
                generations = list(delta.generations)
                generations[index] = known - 1
                old = TableDelta(delta.slot, delta.start_index, delta.block_ids, tuple(generations))
                return replace(plan, table_deltas=[*plan.table_deltas[:place], old, *plan.table_deltas[place + 1 :]])
    return None
