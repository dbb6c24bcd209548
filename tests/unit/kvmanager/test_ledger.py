"""The ledger notices each kind of disagreement."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.ledger import violations
from support.pools import DrivenPool, tokens


def busy_pool() -> DrivenPool:
    """Blocks 0 and 1 cached, 2 and 3 active, 4 a credit, 5 quarantined, 6 and 7 free."""
    pool = DrivenPool(8)
    pool.cache(1, tokens(0, 32))
    pool.admit(2, tokens(100, 132))
    pool.send(credit_target=1)
    pool.credit_target = 1
    pool.admit(3, tokens(200, 216))
    pool.release(3, last_step=9)
    return pool


def test_a_busy_pool_is_sound() -> None:
    pool = busy_pool()
    counts = pool.counts
    assert (counts.cached, counts.active, counts.granted, counts.quarantined, counts.free) == (2, 2, 1, 1, 2)
    assert violations(pool.pool) == []


def _free_twice(blocks: BlockPool) -> None:
    blocks.free.append(blocks.free[0])


def _lose_a_free_block(blocks: BlockPool) -> None:
    blocks.free.pop()


def _count_a_reference_too_many(blocks: BlockPool) -> None:
    blocks.ref_counts[2] += 1


def _forget_a_credit(blocks: BlockPool) -> None:
    blocks.granted.clear()


def _evict_without_the_index(blocks: BlockPool) -> None:
    blocks.keys[0] = None


def _drop_an_index_entry(blocks: BlockPool) -> None:
    blocks.key_to_block.popitem()


def _give_a_free_block_a_key(blocks: BlockPool) -> None:
    blocks.keys[7] = blocks.keys[0]


def _free_an_active_block(blocks: BlockPool) -> None:
    blocks.states[2] = blocks.states[7]


def _acknowledge_and_keep_in_quarantine(blocks: BlockPool) -> None:
    blocks.quarantine.acknowledged_step = 9


def _free_before_the_fence(blocks: BlockPool) -> None:
    blocks.quarantine.fences[7] = 12


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (_free_twice, "in the free list more than once"),
        (_lose_a_free_block, "either marked or listed as FREE"),
        (_count_a_reference_too_many, "block 2 counts 2 references and is in 1 tables"),
        (_forget_a_credit, "either marked or listed as GRANTED"),
        (_evict_without_the_index, "points to block 0, which does not carry it"),
        (_drop_an_index_entry, "carries a key that is not its entry"),
        (_give_a_free_block_a_key, "block 7 is FREE and carries a key"),
        (_free_an_active_block, "block 2 is FREE and in 1 tables"),
        (_acknowledge_and_keep_in_quarantine, "block 5 is QUARANTINED, its fence 9 is acknowledged"),
        (_free_before_the_fence, "block 7 is FREE, its fence 12 is not acknowledged"),
    ],
)
def test_each_fault_is_named(fault: Callable[[BlockPool], None], complaint: str) -> None:
    pool = busy_pool()
    fault(pool.pool.blocks)
    assert any(complaint in violation for violation in violations(pool.pool))
