"""Admissions: prefix hits, and who gets blocks now, later or never."""

from __future__ import annotations

import pytest

from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import Admission, Admitted, Verdict
from octavo.kvmanager.pool import PoolSettings
from support.pools import DrivenPool, tokens


def test_a_first_sequence_gets_new_blocks_for_all_its_tokens() -> None:
    admitted = DrivenPool(8).admit(1, tokens(0, 40))
    assert admitted.verdict is Verdict.OK
    assert admitted.block_ids == (0, 1, 2)
    assert admitted.generations == (1, 1, 1)
    assert admitted.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_cached_tokens"),
    [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (63, 48), (64, 48), (65, 64)],
)
def test_the_same_prompt_again_leaves_at_least_one_token_to_compute(num_tokens: int, num_cached_tokens: int) -> None:
    pool = DrivenPool(16)
    first = pool.cache(1, tokens(0, num_tokens))
    again = pool.admit(2, tokens(0, num_tokens))
    assert again.num_cached_tokens == num_cached_tokens
    num_hits = num_cached_tokens // 16
    assert list(again.block_ids[:num_hits]) == first[:num_hits]
    assert len(again.block_ids) == len(first)


def test_the_next_turn_hits_prompt_and_answer() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 64))
    pool.publish(1, 64)
    pool.grow(1)
    pool.publish(1, 80, tokens(64, 80))
    pool.release(1)
    assert pool.admit(2, tokens(0, 100)).num_cached_tokens == 80


def test_only_published_blocks_are_hit() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 64))
    assert pool.admit(2, tokens(0, 64)).num_cached_tokens == 0
    pool.publish(1, 40)
    assert pool.admit(3, tokens(0, 64)).num_cached_tokens == 32


def test_a_prompt_that_shares_part_of_another_gets_its_own_blocks_from_there() -> None:
    pool = DrivenPool(16)
    secret = pool.cache(1, (*tokens(0, 50), *tokens(900, 930)))
    other = pool.admit(2, (*tokens(0, 40), *tokens(500, 520)))
    assert other.num_cached_tokens == 32
    assert list(other.block_ids[:2]) == secret[:2]
    assert set(other.block_ids[2:]).isdisjoint(secret)


def test_salts_do_not_share() -> None:
    pool = DrivenPool(16)
    pool.cache(1, tokens(0, 64))
    assert pool.admit(2, tokens(0, 64), salt=b"tenant").num_cached_tokens == 0
    pool.publish(2, 64)
    assert pool.admit(3, tokens(0, 64), salt=b"tenant").num_cached_tokens == 48
    assert pool.admit(4, tokens(0, 64)).num_cached_tokens == 48
    assert set(pool.table(3)[:3]).isdisjoint(pool.table(4))


def test_an_evicted_prefix_is_not_found() -> None:
    pool = DrivenPool(2)
    pool.cache(1, tokens(0, 16))
    pool.admit(2, tokens(100, 132))
    assert pool.table(2) == [1, 0]
    pool.publish(2, 32)
    pool.release(2)
    assert pool.admit(3, tokens(0, 17)).num_cached_tokens == 0


def test_idle_cached_blocks_never_stand_in_the_way() -> None:
    pool = DrivenPool(100)
    pool.cache(1, tokens(0, 95 * 16))
    assert pool.counts.cached == 95
    admitted = pool.admit(2, tokens(5000, 5160))
    assert admitted.verdict is Verdict.OK
    assert set(admitted.block_ids[:5]) == {95, 96, 97, 98, 99}
    assert admitted.block_ids[5:] == (94, 93, 92, 91, 90)  # the end of the old prefix is the least recently used
    pool.release(2)
    assert pool.admit(3, tokens(0, 95 * 16)).num_cached_tokens == 90 * 16


def test_hits_are_not_evicted_for_the_blocks_behind_them() -> None:
    pool = DrivenPool(4)
    assert pool.cache(1, tokens(0, 32)) == [0, 1]
    pool.admit(2, tokens(900, 916))
    assert pool.admit(3, tokens(0, 64)).verdict is Verdict.LATER  # 2 hits, 2 new; 1 is free
    assert pool.counts.cached == 2
    pool.release(2)
    assert pool.admit(3, tokens(0, 64)).block_ids[:2] == (0, 1)


def test_a_sequence_larger_than_the_pool_is_told_never_and_the_next_one_is_served() -> None:
    pool = DrivenPool(64)
    reply = pool.send(
        admissions=[Admission(1, tokens(0, 1025)), Admission(2, tokens(0, 1024)), Admission(3, tokens(0, 10))]
    )
    assert [answer.verdict for answer in reply.admitted] == [Verdict.NEVER, Verdict.OK, Verdict.LATER]
    pool.release(2)
    assert pool.admit(3, tokens(0, 10)).verdict is Verdict.OK


def test_after_the_first_later_the_rest_wait_too_but_never_is_told_at_once() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 64))
    reply = pool.send(
        admissions=[
            Admission(2, tokens(100, 180)),
            Admission(3, tokens(200, 210)),
            Admission(4, tokens(0, 200)),
        ]
    )
    assert [answer.verdict for answer in reply.admitted] == [Verdict.LATER, Verdict.LATER, Verdict.NEVER]
    assert pool.counts.active == 4
    assert pool.stats.num_admissions == {Verdict.OK: 1, Verdict.LATER: 2, Verdict.NEVER: 1}


def test_the_watermark_is_left_available_while_others_run() -> None:
    pool = DrivenPool(20, settings=PoolSettings(watermark=0.1))
    pool.admit(1, tokens(0, 16))
    assert pool.admit(2, tokens(100, 100 + 18 * 16)).verdict is Verdict.LATER
    assert pool.admit(2, tokens(100, 100 + 17 * 16)).verdict is Verdict.OK


def test_at_least_one_block_is_left_available_in_a_small_pool() -> None:
    pool = DrivenPool(2)
    pool.admit(1, tokens(0, 16))
    assert pool.admit(2, tokens(100, 116)).verdict is Verdict.LATER


def test_a_sequence_alone_may_fill_the_pool() -> None:
    assert DrivenPool(2).admit(1, tokens(0, 32)).block_ids == (0, 1)


def test_quarantined_blocks_are_not_available_until_their_step_is_acknowledged() -> None:
    pool = DrivenPool(4)
    pool.admit(1, tokens(0, 64))
    pool.release(1, last_step=3)
    assert pool.admit(2, tokens(100, 116)).verdict is Verdict.LATER
    pool.send(acknowledged_step=3)
    assert pool.admit(2, tokens(100, 116)).verdict is Verdict.OK


def test_a_quarantined_prefix_is_hit() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 33))
    pool.publish(1, 33)
    pool.release(1, last_step=7)
    assert pool.counts.quarantined == 3
    assert pool.admit(2, tokens(0, 33)).num_cached_tokens == 32
    pool.send(acknowledged_step=7)
    assert pool.counts.active == 3


def test_a_sequence_that_asks_again_with_more_tokens_is_judged_by_those() -> None:
    pool = DrivenPool(4)
    pool.admit(1, tokens(0, 48))
    assert pool.admit(2, tokens(0, 40)).verdict is Verdict.LATER
    pool.publish(1, 48)
    pool.release(1)
    assert pool.admit(2, (*tokens(0, 16), *tokens(70, 100))).num_cached_tokens == 16


def test_hit_tokens_are_counted_once_a_sequence_is_admitted() -> None:
    pool = DrivenPool(8)
    pool.cache(1, tokens(0, 64))
    pool.admit(2, tokens(0, 64))
    assert (pool.stats.num_prefix_lookup_tokens, pool.stats.num_prefix_hit_tokens) == (128, 48)


def test_a_live_sequence_is_not_admitted_twice() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 16))
    with pytest.raises(ProtocolError, match="sequence 1 holds a table already"):
        pool.admit(1, tokens(0, 16))


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no tokens"):
        DrivenPool(8).admit(1, ())


def slab(pool: DrivenPool, sequence_id: int, num_table_tokens: int) -> Admitted:
    """Of a prompt of 10 tokens."""
    admission = Admission(sequence_id, tokens(0, 10), computes_itself=True, num_table_tokens=num_table_tokens)
    [answer] = pool.send(admissions=[admission]).admitted
    return answer


def test_a_slab_is_the_lowest_run_of_neighbours_that_is_long_enough() -> None:
    pool = DrivenPool(12)
    assert [slab(pool, number, 48).block_ids for number in range(3)] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    pool.release(1)
    assert slab(pool, 4, 50).verdict is Verdict.LATER, "six are free, but no four of them together"
    assert slab(pool, 5, 33).block_ids == (3, 4, 5)
    pool.release(2)
    assert slab(pool, 4, 96).block_ids == (6, 7, 8, 9, 10, 11)


def test_a_slab_larger_than_the_pool_never_fits() -> None:
    pool = DrivenPool(4)
    assert slab(pool, 1, 65).verdict is Verdict.NEVER
    assert slab(pool, 2, 64).block_ids == (0, 1, 2, 3)
