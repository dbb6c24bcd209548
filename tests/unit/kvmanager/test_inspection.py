"""Looking at a pool without changing it."""

from __future__ import annotations

from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.inspection import (
    PrefixNode,
    TableView,
    ledger_violations,
    pool_map,
    prefix_nodes,
    tables_after,
)
from octavo.kvmanager.ledger import PAUSE_BLOCKS, judge, take_books
from support.pools import DrivenPool, tokens

FREE, ACTIVE, CACHED = BlockState.FREE, BlockState.ACTIVE, BlockState.CACHED


def test_the_map_shows_states_references_generations_and_owners() -> None:
    driven = DrivenPool(num_blocks=6)
    driven.cache(1, tokens(0, 32))  # blocks 0 and 1
    driven.admit(2, tokens(0, 40))  # hits both, and takes block 2
    driven.admit(3, tokens(0, 33))
    found = pool_map(driven.pool, 0, 100)
    assert found.states == [ACTIVE, ACTIVE, ACTIVE, ACTIVE, FREE, FREE]
    assert found.ref_counts == [2, 2, 1, 1, 0, 0]
    assert found.owners[2:] == [2, 3, 0, 0]
    assert found.owners[0] in (2, 3)
    assert found.is_published == [True, True, False, False, False, False]
    assert found.generations == [1, 1, 1, 1, 0, 0]
    part = pool_map(driven.pool, 3, 2)
    assert (part.first, part.states, part.owners) == (3, [ACTIVE, FREE], [3, 0])


def test_tables_come_in_pages() -> None:
    driven = DrivenPool(num_blocks=20)
    for sequence_id in (5, 2, 9):
        driven.admit(sequence_id, tokens(100 * sequence_id, 100 * sequence_id + 40))
    first = tables_after(driven.pool, 0, max_blocks=6)
    assert [table.sequence_id for table in first] == [2, 5]
    assert tables_after(driven.pool, 5, max_blocks=1) == [TableView(9, driven.table(9), 40, 0)]
    assert tables_after(driven.pool, 9, max_blocks=1) == []


def test_the_prefix_tree_has_parents_and_depths() -> None:
    driven = DrivenPool(num_blocks=12)
    driven.cache(1, tokens(0, 48))  # 0, 1, 2
    driven.admit(2, tokens(0, 32) + tokens(500, 516))  # 0, 1 and a block of its own
    driven.publish(2, 48)
    own = driven.table(2)[2]
    nodes, end = prefix_nodes(driven.pool, 0, 100)
    expected = {
        0: PrefixNode(0, -1, 0, 1),
        1: PrefixNode(1, 0, 1, 1),
        2: PrefixNode(2, 1, 2, 0),
        own: PrefixNode(own, 1, 2, 1),
    }
    assert {node.block_id: node for node in nodes} == expected
    assert end == 12
    page, next_block = prefix_nodes(driven.pool, 0, 2)
    rest, _ = prefix_nodes(driven.pool, next_block, 100)
    assert [*page, *rest] == nodes


def test_a_block_whose_parent_is_gone_cannot_be_hit() -> None:
    driven = DrivenPool(num_blocks=4)
    driven.cache(1, tokens(0, 64))
    blocks = driven.pool.blocks
    gone = next(block for block in range(4) if blocks.parents[block] is None)
    key = blocks.keys[gone]
    assert key is not None
    driven.send()
    nodes, _ = prefix_nodes(driven.pool, 0, 100)
    assert {node.depth for node in nodes} == {0, 1, 2, 3}
    blocks.keys[gone] = None
    blocks.key_to_block.pop(key)
    nodes, _ = prefix_nodes(driven.pool, 0, 100)
    assert {node.depth for node in nodes} == {-1}


async def test_the_ledger_is_checked_on_a_copy() -> None:
    driven = DrivenPool(num_blocks=16)
    driven.cache(1, tokens(0, 48))
    driven.admit(2, tokens(0, 80))
    assert await ledger_violations(driven.pool) == []
    driven.pool.blocks.ref_counts[driven.table(2)[0]] += 1
    assert len(await ledger_violations(driven.pool)) == 1
    driven.pool.blocks.ref_counts[driven.table(2)[0]] -= 1
    driven.release(2)


def test_the_check_of_a_large_pool_pauses_every_thousand_blocks() -> None:
    driven = DrivenPool(num_blocks=5000, block_size=1)
    driven.cache(1, tokens(0, 3000))
    pauses = [violation for violation in judge(take_books(driven.pool), driven.pool) if violation is None]
    assert len(pauses) >= 3 * 5000 // PAUSE_BLOCKS


async def test_a_pool_that_changes_while_it_is_checked_is_judged_as_of_the_call() -> None:
    driven = DrivenPool(num_blocks=4000, block_size=1)
    driven.cache(1, tokens(0, 2500))
    driven.admit(2, tokens(5000, 5900))
    books = take_books(driven.pool)
    found = []
    for number, violation in enumerate(judge(books, driven.pool)):
        found += [] if violation is None else [violation]
        if number < 20:  # evicts, publishes, releases between slices
            driven.cache(100 + number, tokens(10_000 * number, 10_000 * number + 1200))
    assert found == []
    driven.pool.blocks.states[17] = BlockState.GRANTED
    assert any("block 17 " in violation for violation in await ledger_violations(driven.pool))
