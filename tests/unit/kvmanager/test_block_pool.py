"""The pool: which block is handed out next, and when a released one may be."""

from __future__ import annotations

import pytest

from octavo.common.block_hash import BlockHasher, BlockKey, TokenChain
from octavo.common.codecs.arrays import pack_int32
from octavo.common.errors import InternalError, ProtocolError
from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.block_state import BlockState


def key(token_id: int) -> BlockKey:
    """The key of a block of 16 times this token."""
    return TokenChain(BlockHasher(16), pack_int32([token_id] * 16)).key(0)


def allocate(pool: BlockPool, num_blocks: int) -> list[int]:
    taken = pool.allocate(num_blocks)
    assert taken is not None
    return taken


def test_the_most_recently_freed_block_goes_first() -> None:
    pool = BlockPool(4)
    assert allocate(pool, 3) == [0, 1, 2]
    pool.release([0], last_step=0)
    pool.release([2], last_step=0)
    assert allocate(pool, 3) == [2, 0, 3]


def test_more_blocks_than_available_are_refused_whole() -> None:
    pool = BlockPool(4)
    allocate(pool, 3)
    assert pool.allocate(2) is None
    assert pool.counts().free == 1


def test_a_prefix_is_found_until_its_block_is_needed() -> None:
    pool = BlockPool(2)
    [first] = allocate(pool, 1)
    pool.publish(first, key(7))
    pool.release([first], last_step=0)

    assert pool.find(key(7)) == first
    pool.pin(first)
    pool.release([first], last_step=0)

    assert allocate(pool, 2) == [1, first]  # the free block goes first, the cached one last
    assert pool.find(key(7)) is None
    assert pool.stats.num_evictions == 1


def test_the_least_recently_used_cached_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    for block_id in allocate(pool, 3):
        pool.publish(block_id, key(block_id))
        pool.release([block_id], last_step=0)
    pool.pin(0)
    pool.release([0], last_step=0)
    assert [allocate(pool, 1) for _ in range(3)] == [[1], [2], [0]]


def test_a_second_mention_in_one_release_is_refused() -> None:
    pool = BlockPool(8)
    [block_id] = allocate(pool, 1)
    assert pool.counts().free == 7
    with pytest.raises(InternalError, match=r"\[0\]"):
        pool.release([block_id, block_id], last_step=0)
    assert pool.counts().free == 8
    assert sorted(allocate(pool, 8)) == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_released_block_waits_for_its_step() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    pool.release([0], last_step=5)
    assert pool.states[0] is BlockState.QUARANTINED
    pool.acknowledge(4)
    assert pool.allocate(1) is None
    pool.acknowledge(5)
    assert pool.allocate(1) == [0]


def test_a_shared_block_waits_for_the_latest_step_of_all_its_holders() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    pool.pin(0)
    pool.release([0], last_step=9)
    pool.release([0], last_step=3)
    pool.acknowledge(8)
    assert pool.counts().quarantined == 1
    pool.acknowledge(9)
    assert pool.states[0] is BlockState.FREE


def test_a_quarantined_block_is_hit_and_its_old_entry_frees_nothing() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    pool.publish(0, key(7))
    pool.release([0], last_step=3)
    assert pool.find(key(7)) == 0
    pool.pin(0)
    pool.acknowledge(3)
    assert pool.states[0] is BlockState.ACTIVE


def test_a_block_released_again_stays_until_its_later_fence() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    pool.publish(0, key(7))
    pool.release([0], last_step=3)
    pool.pin(0)
    pool.release([0], last_step=6)
    pool.acknowledge(3)
    assert pool.counts().quarantined == 1
    pool.acknowledge(6)
    assert pool.states[0] is BlockState.CACHED


def test_a_block_released_twice_under_one_fence_leaves_quarantine_once() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    pool.publish(0, key(7))
    pool.release([0], last_step=3)
    pool.pin(0)
    pool.release([0], last_step=3)
    pool.acknowledge(3)
    assert list(pool.cached) == [0]
    assert pool.counts().quarantined == 0


def test_steps_are_acknowledged_in_order() -> None:
    pool = BlockPool(1)
    pool.acknowledge(5)
    with pytest.raises(ProtocolError, match="step 4"):
        pool.acknowledge(4)


def test_the_first_publisher_wins() -> None:
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.publish(first, key(7))
    pool.publish(second, key(7))
    assert pool.find(key(7)) == first
    pool.release([second], last_step=0)
    assert pool.states[second] is BlockState.FREE


def test_a_generation_rises_with_each_new_use_and_not_with_a_hit() -> None:
    pool = BlockPool(1)
    allocate(pool, 1)
    assert pool.generations[0] == 1
    pool.publish(0, key(7))
    pool.release([0], last_step=0)
    pool.pin(0)
    assert pool.generations[0] == 1
    pool.release([0], last_step=0)
    assert pool.grant(1) == [0]
    assert pool.generations[0] == 2
    pool.spend(0)
    assert pool.generations[0] == 2


def test_a_credit_is_spent_or_returned_once() -> None:
    pool = BlockPool(2)
    assert pool.grant(2) == [0, 1]
    pool.spend(0)
    pool.return_credit(1)
    for block_id in (0, 1, 2):
        with pytest.raises(ProtocolError, match="is not a credit"):
            pool.spend(block_id)
        with pytest.raises(ProtocolError, match="is not a credit"):
            pool.return_credit(block_id)


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(InternalError, match="FREE"):
        BlockPool(1).pin(0)
