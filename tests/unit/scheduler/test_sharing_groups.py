"""Which rows can read their leading blocks together."""

from __future__ import annotations

import random

import pytest

from octavo.common.messages.step import SharingGroup
from octavo.scheduler.sharing_groups import SharingGroups


def grouped(groups: SharingGroups, slots: list[int]) -> dict[frozenset[int], int]:
    return {frozenset(group.slots): group.num_blocks for group in groups.of_rows(slots)}


def test_rows_with_one_prefix_form_one_group() -> None:
    groups = SharingGroups(min_blocks=2)
    groups.open(0, [1, 2, 3, 10])
    groups.open(1, [1, 2, 3, 11])
    groups.open(2, [4, 5, 6])
    assert grouped(groups, [0, 1, 2]) == {frozenset({0, 1}): 3}


def test_a_run_below_the_minimum_is_no_group() -> None:
    groups = SharingGroups(min_blocks=4)
    groups.open(0, [1, 2, 3, 10])
    groups.open(1, [1, 2, 3, 11])
    assert groups.of_rows([0, 1]) == []


def test_the_split_that_saves_more_reads_is_taken() -> None:
    system_prompt = [1, 2]
    one, other = [*system_prompt, *range(10, 20)], [*system_prompt, *range(20, 30)]
    groups = SharingGroups(min_blocks=1)
    for slot, table in enumerate([one, one, other, other]):
        groups.open(slot, [*table, 100 + slot])
    assert grouped(groups, [0, 1, 2, 3]) == {frozenset({0, 1}): 12, frozenset({2, 3}): 12}  # saves 24, not 6
    groups.close(1)
    groups.close(3)
    assert grouped(groups, [0, 2]) == {frozenset({0, 2}): 2}


def test_a_row_that_sits_out_is_not_named() -> None:
    groups = SharingGroups(min_blocks=1)
    for slot in range(3):
        groups.open(slot, [1, 2, 10 + slot])
    assert grouped(groups, [0, 2]) == {frozenset({0, 2}): 2}
    assert groups.of_rows([1]) == []


def test_a_branch_shares_what_its_parent_wrote_after_it_was_opened() -> None:
    groups = SharingGroups(min_blocks=1)
    parent = [1, 2]
    groups.open(0, parent)
    parent += [3, 4, 5]
    groups.open(1, [1, 2, 3, 4, 90])
    assert groups.of_rows([0, 1]) == [SharingGroup((0, 1), 4)] or groups.of_rows([0, 1]) == [SharingGroup((1, 0), 4)]


def test_tables_that_end_where_they_part_are_grouped_too() -> None:
    groups = SharingGroups(min_blocks=1)
    for slot in range(3):
        groups.open(slot, [7, 8])
    assert grouped(groups, [0, 1, 2]) == {frozenset({0, 1, 2}): 2}


def test_equal_blocks_behind_different_ones_do_not_count() -> None:
    """Two sequences computed block 1 side by side as 2 and 3; both then hit block 4."""
    groups = SharingGroups(min_blocks=1)
    groups.open(0, [1, 2, 4, 5])
    groups.open(1, [1, 3, 4, 5])
    assert grouped(groups, [0, 1]) == {frozenset({0, 1}): 1}


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_opening_and_closing_gives_the_groups_of_a_fresh_tree(seed: int) -> None:
    dice = random.Random(seed)
    min_blocks = dice.choice([1, 2, 4])
    groups = SharingGroups(min_blocks)
    tables: dict[int, list[int]] = {}
    next_block = 1000
    for _ in range(200):
        slot = dice.randrange(12)
        if slot in tables:
            del tables[slot]
            groups.close(slot)
        else:
            if tables and dice.random() < 0.8:
                leader = dice.choice(list(tables.values()))
                table = leader[: dice.randrange(len(leader) + 1)]
            else:
                table = []
            grown = dice.randrange(0 if table else 1, 4)
            tables[slot] = table + list(range(next_block, next_block + grown))
            next_block += grown
            groups.open(slot, tables[slot])
        fresh = SharingGroups(min_blocks)
        for other, table in tables.items():
            fresh.open(other, table)
        saved = [sum((len(s) - 1) * n for s, n in grouped(g, list(tables)).items()) for g in (groups, fresh)]
        assert saved[0] == saved[1]
        for slots, num_blocks in grouped(groups, list(tables)).items():
            assert num_blocks >= min_blocks
            assert len({tuple(tables[s][:num_blocks]) for s in slots}) == 1
            assert all(len(tables[s]) >= num_blocks for s in slots)
