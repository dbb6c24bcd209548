"""Groups are believed only where the worker's own tables say the same."""

from __future__ import annotations

import pytest

from octavo.common.messages.step import SharingGroup, StepPlan, TableDelta
from octavo.worker.block_tables import BlockTables
from octavo.worker.shared_runs import SharedRun, shared_runs


@pytest.fixture
def tables() -> BlockTables:
    tables = BlockTables(num_slots=4, max_blocks_per_seq=8, num_blocks=32)
    rows = [(1, 2, 3, 10), (1, 2, 3, 11), (1, 2, 4, 12), (5, 6, 7, 13)]
    tables.append_on_host([TableDelta(slot, 0, row, (1,) * 4) for slot, row in enumerate(rows)])
    return tables


def runs(tables: BlockTables, *groups: SharingGroup, start: int = 50) -> list[SharedRun]:
    plan = StepPlan(step_id=1, slots=[3, 2, 1, 0], starts=[start] * 4, lengths=[1] * 4, flags=[1] * 4)
    plan.groups.extend(groups)
    return shared_runs(plan, tables, block_size=16)


def test_a_group_becomes_rows_of_the_step(tables: BlockTables) -> None:
    assert runs(tables, SharingGroup((0, 1), 3)) == [SharedRun((3, 2), 3)]
    assert runs(tables, SharingGroup((0, 1, 2), 2)) == [SharedRun((3, 2, 1), 2)]


@pytest.mark.parametrize(
    "group",
    [
        SharingGroup((0, 1), 4),  # the last entries differ
        SharingGroup((0, 3), 1),
        SharingGroup((0, 2), 3),
        SharingGroup((0, 9), 1),  # no such slot
        SharingGroup((0, -1), 1),
        SharingGroup((0, 0), 1),
        SharingGroup((0,), 1),
        SharingGroup((0, 1), 0),
    ],
)
def test_a_group_that_does_not_hold_is_left_out_and_others_stay(tables: BlockTables, group: SharingGroup) -> None:
    assert runs(tables, group, SharingGroup((1, 2), 2)) == [SharedRun((2, 1), 2)]


def test_blocks_that_a_row_may_still_write_are_not_shared(tables: BlockTables) -> None:
    assert runs(tables, SharingGroup((0, 1), 3), start=47) == []
    assert runs(tables, SharingGroup((0, 1), 3), start=48) == [SharedRun((3, 2), 3)]
