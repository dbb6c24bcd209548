"""Single flight, eviction, flushes, and the reason of every miss."""

from __future__ import annotations

import pytest

from octavo.common.messages.kv import (
    Admission,
    Admitted,
    Arrival,
    MissReason,
    PrefixMiss,
    Publication,
    Release,
    Verdict,
    WaitReason,
)
from octavo.kvmanager.flush import Flushed, FlushScope
from octavo.kvmanager.pool import PoolSettings
from support.pools import DrivenPool, tokens


def reasons(answer: Admitted) -> dict[MissReason, int]:
    return {miss.reason: miss.num_blocks for miss in answer.misses}


# Single flight


def test_a_follower_waits_for_the_block_that_its_leader_computes_and_holds_none() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 64))
    answer = pool.admit(2, tokens(0, 64), waits=True)
    assert (answer.verdict, answer.wait_reason, answer.awaited_sequence_id) == (
        Verdict.LATER,
        WaitReason.IN_FLIGHT,
        1,
    )
    assert pool.counts.active == 4


def test_a_follower_wakes_once_its_next_block_is_not_the_leaders() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 64))
    follower = (*tokens(0, 32), *tokens(500, 520))
    pool.publish(1, 16)
    assert pool.admit(2, follower, waits=True).wait_reason is WaitReason.IN_FLIGHT
    pool.publish(1, 32)
    assert pool.admit(2, follower, waits=True).num_cached_tokens == 32


@pytest.mark.parametrize("num_published", [0, 16])
def test_when_the_leader_is_gone_the_first_that_asks_leads(num_published: int) -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 64))
    pool.publish(1, num_published)
    assert pool.admit(2, tokens(0, 64), waits=True).awaited_sequence_id == 1
    admissions = [Admission(number, tokens(0, 64)) for number in (2, 3)]
    second, third = pool.send(releases=[Release(1, 0)], admissions=admissions).admitted
    assert (second.verdict, second.num_cached_tokens) == (Verdict.OK, num_published)
    assert third.awaited_sequence_id == 2


def test_a_follower_does_not_hold_up_those_behind_it() -> None:
    pool = DrivenPool(16)
    prompts = [tokens(0, 64), tokens(0, 64), tokens(500, 520)]
    admissions = [Admission(number, prompt) for number, prompt in enumerate(prompts, 1)]
    answers = pool.send(admissions=admissions).admitted
    assert [answer.verdict for answer in answers] == [Verdict.OK, Verdict.LATER, Verdict.OK]


def test_who_computes_itself_does_not_wait_and_the_first_publisher_wins() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 64))
    impatient = pool.admit(2, tokens(0, 64))
    assert reasons(impatient) == {MissReason.IN_FLIGHT: 4}
    pool.publish(2, 64)
    assert pool.admit(3, tokens(0, 64), waits=True).block_ids[:3] == impatient.block_ids[:3]


def test_the_last_block_of_a_prompt_is_not_waited_for() -> None:
    """A token must be left to compute, so it could not be hit anyway."""
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 32))
    pool.publish(1, 16)
    assert pool.admit(2, tokens(0, 32), waits=True).verdict is Verdict.OK


# Eviction


def fill_and_hit(protected_share: float) -> DrivenPool:
    pool = DrivenPool(20, settings=PoolSettings(watermark=0, protected_share=protected_share))
    pool.cache(1, tokens(0, 64))
    pool.cache(2, tokens(0, 64))  # hits the first three blocks
    return pool


@pytest.mark.parametrize(("protected_share", "num_cached_tokens"), [(0.8, 48), (0.0, 0)])
def test_one_long_prompt_does_not_flush_what_others_share(protected_share: float, num_cached_tokens: int) -> None:
    pool = fill_and_hit(protected_share)
    pool.cache(3, tokens(1000, 1000 + 17 * 16))
    pool.cache(4, tokens(2000, 2000 + 17 * 16))
    assert pool.admit(5, tokens(0, 64)).num_cached_tokens == num_cached_tokens


def test_what_is_protected_but_not_used_any_more_gives_way_to_newer_hits() -> None:
    pool = DrivenPool(10, settings=PoolSettings(watermark=0, protected_share=0.4))
    for first in (0, 1000, 2000):
        pool.cache(first + 1, tokens(first, first + 50))
        pool.cache(first + 2, tokens(first, first + 50))
    assert pool.admit(9, tokens(2000, 2050)).num_cached_tokens == 48


def test_a_sequence_may_take_every_protected_block() -> None:
    pool = fill_and_hit(0.8)
    assert pool.admit(3, tokens(1000, 1000 + 20 * 16)).verdict is Verdict.OK


# Flush


def test_after_a_flush_of_all_nothing_is_found_and_cached_blocks_are_free() -> None:
    pool = DrivenPool(16)
    pool.cache(1, tokens(0, 64))
    pool.admit(2, tokens(500, 532))
    pool.publish(2, 32)
    assert pool.pool.flush(FlushScope()) == Flushed(num_freed_blocks=4, num_used_blocks=2, num_sequences=1)
    assert (pool.counts.cached, pool.counts.free) == (0, 14)
    answer = pool.admit(3, tokens(0, 64))
    assert (answer.num_cached_tokens, reasons(answer)) == (0, {MissReason.FLUSHED: 4})


def test_a_sequence_from_before_a_flush_publishes_nothing_more_and_nobody_waits_for_it() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 64))
    pool.publish(1, 16)
    pool.pool.flush(FlushScope())
    pool.publish(1, 64)
    child = pool.fork(1, 7, 64)
    assert child.verdict is Verdict.OK
    assert pool.admit(2, tokens(0, 64), waits=True).num_cached_tokens == 0
    pool.publish(2, 64)
    pool.release(1, 7)
    assert pool.admit(3, tokens(0, 64)).block_ids[:3] == tuple(pool.table(2)[:3])


def test_one_that_has_only_arrived_publishes_after_a_flush() -> None:
    pool = DrivenPool(16)
    pool.arrive(1, tokens(0, 64))
    pool.pool.flush(FlushScope())
    pool.admit(1)
    pool.publish(1, 64)
    assert pool.admit(2, tokens(0, 64)).num_cached_tokens == 48


def test_a_flush_of_a_tenant_or_an_adapter_leaves_others_alone() -> None:
    tenant, other = b"T" * 16, b"O" * 16
    pool = DrivenPool(64)
    spaces = {1: (tenant, ""), 2: (tenant + b"narrow", ""), 3: (other, ""), 4: (other, "blue"), 5: (b"", "blue")}
    for number, (salt, adapter) in spaces.items():
        pool.arrive(number, tokens(0, 64), salt, adapter=adapter)
        pool.admit(number)
        pool.publish(number, 64)
        pool.release(number)
    assert pool.pool.flush(FlushScope(salt=tenant)).num_freed_blocks == 8
    assert pool.pool.flush(FlushScope(adapter="blue")).num_freed_blocks == 8
    assert pool.admit(13, tokens(0, 64), salt=other).num_cached_tokens == 48
    assert pool.pool.flush(FlushScope(salt=b"")).num_freed_blocks == 0


# Reasons


def admitted_in(pool: DrivenPool, sequence_id: int, salt: bytes = b"", adapter: str = "", load: int = 0) -> Admitted:
    """The answer to 64 equal tokens in a namespace; they are computed and cached then."""
    arrival = Arrival(sequence_id, tokens(0, 64), salt, adapter, load)
    [answer] = pool.send(arrivals=[arrival], admissions=[Admission(sequence_id, computes_itself=True)]).admitted
    pool.send(publications=[Publication(sequence_id, 64)], releases=[Release(sequence_id, 0)])
    return answer


def test_a_first_prompt_was_never_stored() -> None:
    assert DrivenPool(16).admit(1, tokens(0, 70)).misses == (PrefixMiss(MissReason.NEVER_STORED, 4),)


def test_the_last_block_is_stored_but_leaves_no_token_to_compute() -> None:
    pool = DrivenPool(16)
    pool.cache(1, tokens(0, 64))
    answer = pool.admit(2, tokens(0, 64))
    assert (answer.num_cached_tokens, reasons(answer)) == (48, {MissReason.LAST_TOKEN: 1})


def test_an_evicted_block_tells_for_whom() -> None:
    pool = DrivenPool(4, settings=PoolSettings(watermark=0))
    pool.cache(1, tokens(0, 64))
    pool.cache(2, tokens(500, 532))
    assert pool.admit(3, tokens(0, 64)).misses == (PrefixMiss(MissReason.EVICTED, 2, evicted_by=2),)


def test_other_salts_adapters_and_loads_are_told_apart() -> None:
    """pfx-6e5 as well: a salt that spells an adapter's name finds nothing of the adapter."""
    pool = DrivenPool(64)
    assert reasons(admitted_in(pool, 1, adapter="blue")) == {MissReason.NEVER_STORED: 4}
    assert reasons(admitted_in(pool, 2, salt=b"blue")) == {MissReason.OTHER_ADAPTER: 4}
    assert reasons(admitted_in(pool, 3, salt=b"red")) == {MissReason.OTHER_SALT: 4}
    assert reasons(admitted_in(pool, 4, adapter="blue", load=1)) == {MissReason.OTHER_ADAPTER: 4}
    assert admitted_in(pool, 5, adapter="blue", load=1).num_cached_tokens == 48


def test_hits_and_reasons_add_up_to_all_blocks_looked_up() -> None:
    pool = DrivenPool(8, settings=PoolSettings(watermark=0))
    for number in range(1, 40):
        pool.cache(number, (*tokens(0, 16 * (number % 4)), *tokens(100 * (number % 7), 100 * (number % 7) + 40)))
    stats = pool.stats
    assert stats.num_prefix_hit_blocks > 0
    assert stats.num_missed_blocks[MissReason.EVICTED] > 0
    missed = sum(stats.num_missed_blocks.values())
    assert stats.num_prefix_hit_blocks + missed == stats.num_prefix_lookup_blocks


# FAULTS


def test_an_evicted_block_is_not_found_while_its_new_owner_has_it() -> None:
    """blk-e74: free list, index and key change together."""
    pool = DrivenPool(2, settings=PoolSettings(watermark=0))
    pool.cache(1, tokens(0, 16))
    pool.admit(2, tokens(100, 132))
    assert pool.admit(3, tokens(0, 16)).verdict is Verdict.LATER
    assert pool.pool.blocks.key_to_block == {}
