"""Checks which rows of a step really begin with the same blocks, so that attention may read them once."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.common.messages.step import SharingGroup, StepPlan
from octavo.worker.block_tables import BlockTables


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Rows of a step whose tables have the same first `num_blocks` entries, all of them full before the step."""

    rows: tuple[int, ...]  # places in the step, at least 2
    num_blocks: int


def shared_runs(plan: StepPlan, tables: BlockTables, block_size: int) -> list[SharedRun]:
    """The plan's groups that hold on this worker's tables. The others are left out: their rows run ungrouped.

    Groups are hints. One is left out if it names a slot without a row, or one of an earlier group,, if the leading
    entries differ, or if a row writes to them.
    """
    row_of_slot = {slot: row for row, slot in enumerate(plan.slots)}
    found = []
    for group in plan.groups:
        slots = set(group.slots)
        if len(slots) != len(group.slots) or len(slots) < 2 or not slots <= row_of_slot.keys():
            continue
        rows = [row_of_slot[slot] for slot in group.slots]
        if _holds(plan, rows, group, tables, block_size):
            found.append(SharedRun(tuple(rows), group.num_blocks))
            for slot in slots:
                del row_of_slot[slot]
    return found


def _holds(plan: StepPlan, rows: list[int], group: SharingGroup, tables: BlockTables, block_size: int) -> bool:
    if not 0 < group.num_blocks <= min(plan.starts[row] for row in rows) // block_size:
        return False
    leading = tables.on_host[list(group.slots), : group.num_blocks]
    return bool((leading == leading[0]).all())
