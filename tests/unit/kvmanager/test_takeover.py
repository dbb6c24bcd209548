"""A new scheduler takes the pool of one that is gone: nobody holds a block, and what was cached is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import (
    Admission,
    Arrival,
    DeclaredTable,
    DeclarePool,
    KvReply,
    KvRequest,
    MissReason,
    OpenPool,
    PoolOpened,
    Publication,
    Release,
    SwapOut,
)
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings
from octavo.kvmanager.server import KvManagerServer
from support.kv_streams import Scheduler
from support.pools import DrivenPool, tokens

BOOT_EPOCH = 77
NUM_BLOCKS = 8


def taken_over(pool: Pool, generations: tuple[int, ...] = ()) -> Pool:
    opening = OpenPool("group-0", 2, 1, pool.blocks.num_blocks, 16, pool.tier.host.num_blocks, generations=generations)
    new = Pool(opening, PoolSettings(), pool.stats, cached=pool.let_go())
    assert violations(new) == []
    return new


def hit_tokens(pool: Pool, token_ids: tuple[int, ...]) -> int:
    number = pool.last_message_no + 1
    [admitted] = pool.apply(KvRequest(number, 0, admissions=[Admission(99, token_ids)])).admitted
    pool.apply(KvRequest(number + 1, 0, releases=[Release(99, 0)]))
    return admitted.num_cached_tokens


def test_sequences_and_credits_are_gone_and_published_blocks_are_found() -> None:
    """Sequence 1 has ended under a fence that is closed yet, 2 runs with one block of two published, 3 has arrived."""
    driven = DrivenPool(NUM_BLOCKS)
    driven.admit(1, tokens(0, 32))
    driven.publish(1, 32)
    driven.release(1, last_step=5)
    driven.admit(2, tokens(100, 132))
    driven.publish(2, 16)
    driven.arrive(3, tokens(200, 232))
    driven.send(credit_target=2)
    counts = driven.counts
    assert (counts.quarantined, counts.active, counts.granted) == (2, 2, 2)

    pool = taken_over(driven.pool)
    counts = pool.counts()
    assert (counts.cached, counts.free, counts.active, counts.granted, counts.quarantined) == (3, 5, 0, 0, 0)
    assert (len(pool.tables), len(pool.arrivals)) == (0, 0)
    assert (pool.last_message_no, pool.blocks.quarantine.acknowledged_step) == (0, 0)
    assert hit_tokens(pool, tokens(0, 33)) == 32
    assert hit_tokens(pool, tokens(100, 133)) == 16
    [admitted] = pool.apply(KvRequest(5, 0, admissions=[Admission(2, tokens(0, 33))])).admitted
    assert admitted.num_cached_tokens == 32  # under the number of a sequence that the old scheduler had


def test_blocks_go_on_from_the_generation_that_they_had() -> None:
    driven = DrivenPool(2)
    first = driven.admit(1, tokens(0, 32))
    pool = taken_over(driven.pool)
    [second] = pool.apply(KvRequest(1, 0, admissions=[Admission(1, tokens(50, 82))])).admitted
    before = dict(zip(first.block_ids, first.generations, strict=True))
    assert all(after == before[block] + 1 for block, after in zip(second.block_ids, second.generations, strict=True))


def test_block_that_the_old_scheduler_renewed_by_itself_is_not_found() -> None:
    """While the manager was away it gave the second block to another sequence, under a generation of its own."""
    driven = DrivenPool(NUM_BLOCKS)
    first, second = driven.cache(1, tokens(0, 32))
    generations = [-1] * NUM_BLOCKS
    generations[first], generations[second] = 1, 2
    pool = taken_over(driven.pool, tuple(generations))
    assert pool.blocks.generations[second] == 2
    assert second in pool.blocks.free
    assert hit_tokens(pool, tokens(0, 33)) == 16


def test_generations_of_another_number_of_blocks_are_refused() -> None:
    with pytest.raises(ProtocolError, match="3 generations of 8 blocks"):
        taken_over(DrivenPool(NUM_BLOCKS).pool, (1, 1, 1))


def test_ends_of_tables_are_evicted_before_their_beginnings() -> None:
    driven = DrivenPool(4)
    driven.admit(1, tokens(0, 64))
    driven.publish(1, 64)
    pool = taken_over(driven.pool)
    pool.apply(KvRequest(1, 0, admissions=[Admission(1, tokens(500, 520))]))
    pool.apply(KvRequest(2, 0, releases=[Release(1, 0)]))
    assert hit_tokens(pool, tokens(0, 33)) == 32


def test_who_evicted_a_block_before_is_not_told_by_a_number_that_means_another_now() -> None:
    driven = DrivenPool(2)
    driven.cache(1, tokens(0, 32))
    driven.cache(2, tokens(100, 132))
    pool = taken_over(driven.pool)
    [admitted] = pool.apply(KvRequest(1, 0, admissions=[Admission(2, tokens(0, 32))])).admitted
    assert [(miss.reason, miss.evicted_by) for miss in admitted.misses] == [(MissReason.EVICTED, 0)]


def test_host_memory_keeps_what_arrived_there_and_nothing_of_what_was_on_its_way() -> None:
    """The prefix of 1 has sunk; that of 2 is on its way down; 3 is being swapped out, which nobody can say of after."""
    driven = DrivenPool(2, num_host_blocks=6)
    driven.cache(1, tokens(0, 32))
    [sinking] = driven.send(admissions=[Admission(2, tokens(100, 132), computes_itself=True)]).transfers
    driven.publish(2, 32)
    driven.send(finished_transfers=[sinking.transfer_id], releases=[Release(2, 0)])
    driven.admit(3, tokens(200, 232))
    driven.send(swap_outs=[SwapOut(3, 0, 0)])
    counts = driven.pool.counts()
    assert (counts.transferring, counts.host_cached, counts.host_swapped) == (2, 2, 4)

    pool = taken_over(driven.pool)
    counts = pool.counts()
    assert (counts.free, counts.host_cached, counts.host_free) == (2, 2, 4)
    [restored] = pool.apply(KvRequest(1, 0, admissions=[Admission(1, tokens(0, 32))])).admitted
    assert restored.num_host_tokens == 16  # one token is left to compute
    pool.apply(KvRequest(2, 0, releases=[Release(1, 0)]))


def opening(epoch: int, incarnation: int = 1, *, declares: bool = False) -> OpenPool:
    """Of a scheduler that has just taken the worker, unless it `declares`."""
    generations = () if declares else (1, 1, -1, -1, -1, -1, -1, -1)
    return OpenPool("group-0", epoch, incarnation, NUM_BLOCKS, 16, generations=generations)


PUBLISHED = [
    KvRequest(1, 0, admissions=[Admission(1, tokens(0, 32))]),
    KvRequest(2, 0, publications=[Publication(1, 32)]),
]
ASKS = KvRequest(1, 0, admissions=[Admission(1, tokens(0, 33))])


@pytest.mark.parametrize(("incarnation", "num_hits"), [(1, 32), (2, 0)], ids=["same life", "another life"])
async def test_next_scheduler_finds_the_cache_of_the_same_life_of_the_memory(incarnation: int, num_hits: int) -> None:
    server = KvManagerServer(PoolSettings(), BOOT_EPOCH, check_ledger=True)
    await Scheduler(server).send(opening(epoch=1), *PUBLISHED)
    life = server.pools[0].blocks.events.life
    opened, reply = await Scheduler(server).send(opening(2, incarnation), ASKS)
    assert opened == PoolOpened("group-0", BOOT_EPOCH)
    assert isinstance(reply, KvReply)
    assert reply.admitted[0].num_cached_tokens == num_hits
    assert (server.pools[0].blocks.events.life == life) is (incarnation == 1)


async def test_opening_that_is_repeated_before_any_message_keeps_the_cache() -> None:
    server = KvManagerServer(PoolSettings(), BOOT_EPOCH, check_ledger=True)
    await Scheduler(server).send(opening(epoch=1), *PUBLISHED)
    await Scheduler(server).send(opening(epoch=2))
    _, reply = await Scheduler(server).send(opening(epoch=2), ASKS)
    assert isinstance(reply, KvReply)
    assert reply.admitted[0].num_cached_tokens == 32


async def test_pool_whose_books_may_be_wrong_is_not_taken_over() -> None:
    server = KvManagerServer(PoolSettings(), BOOT_EPOCH)
    await Scheduler(server).send(opening(epoch=1), *PUBLISHED, KvRequest(3, 0, arrivals=[Arrival(1, (1, 2))]))
    _, reply = await Scheduler(server).send(opening(epoch=2), ASKS)
    assert isinstance(reply, KvReply)
    assert (reply.admitted[0].num_cached_tokens, reply.counts.active, reply.counts.free) == (0, 3, 5)


async def test_what_a_stale_scheduler_declared_is_not_taken_over_by_the_owner_of_the_worker() -> None:
    """A new manager without a catalogue could not know that epoch 4 is stale. The owner has used the blocks since."""
    server = KvManagerServer(PoolSettings(), BOOT_EPOCH, check_ledger=True)
    stale = DeclarePool([DeclaredTable(9, tokens(0, 32), 32, (0, 1), (1, 1))], [], launched_step=3, acknowledged_step=3)
    await Scheduler(server).send(opening(4, declares=True), stale)
    assert len(server.pools[0].blocks.key_to_block) == 2
    owner = DeclarePool([], [], launched_step=8, acknowledged_step=8, highest_generation=5)
    _, reply = await Scheduler(server).send(opening(5, declares=True), owner, replace(ASKS, acknowledged_step=8))
    assert isinstance(reply, KvReply)
    assert reply.admitted[0].num_cached_tokens == 0
    assert reply.admitted[0].generations == (6, 6, 6)
