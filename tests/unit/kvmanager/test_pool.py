"""Messages of a pool: their numbers, the order of their items, and credits."""

from __future__ import annotations

import pytest

from octavo.common.errors import MessageGapError, ProtocolError
from octavo.common.messages.kv import Admission, Fork, KvRequest, OpenPool, PoolCounts, Publication, Release, Verdict
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings
from support.pools import DrivenPool, tokens


def open_pool(num_blocks: int = 8) -> Pool:
    return Pool(OpenPool("group-0", 1, 1, num_blocks, 16), PoolSettings())


def test_the_last_message_again_gets_the_last_answer_again() -> None:
    pool = open_pool()
    request = KvRequest(1, 0, admissions=[Admission(1, tokens(0, 16))], credit_target=2)
    first = pool.apply(request)
    assert pool.apply(request) is first
    assert pool.blocks.counts() == PoolCounts(free=5, granted=2, active=1, cached=0, quarantined=0)


@pytest.mark.parametrize("message_no", [0, 1, 4])
def test_any_other_number_than_the_next_is_refused(message_no: int) -> None:
    pool = open_pool()
    pool.apply(KvRequest(1, 0))
    pool.apply(KvRequest(2, 0))
    with pytest.raises(MessageGapError):
        pool.apply(KvRequest(message_no, 0))


def test_the_first_message_is_number_one() -> None:
    for message_no in (0, 2):
        with pytest.raises(MessageGapError):
            open_pool().apply(KvRequest(message_no, 0))


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (8, 0)])
def test_a_pool_without_blocks_or_tokens_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ProtocolError):
        Pool(OpenPool("group-0", 1, 1, num_blocks, block_size), PoolSettings())


def test_an_acknowledgement_counts_for_the_admissions_of_its_message() -> None:
    pool = DrivenPool(2)
    pool.admit(1, tokens(0, 32))
    pool.release(1, last_step=4)
    [answer] = pool.send(acknowledged_step=4, admissions=[Admission(2, tokens(50, 82))]).admitted
    assert answer.verdict is Verdict.OK


def test_a_release_and_returned_credits_count_for_the_admissions_of_their_message() -> None:
    pool = DrivenPool(4)
    pool.admit(1, tokens(0, 32))
    [(first, _), (second, _)] = pool.send(credit_target=2).credits
    reply = pool.send(
        releases=[Release(1, last_step=0)],
        returned_credits=[first, second],
        admissions=[Admission(1, tokens(0, 64))],  # preempted, and asked for again at once
    )
    assert reply.admitted[0].verdict is Verdict.OK


def test_forks_come_before_admissions_and_releases() -> None:
    pool = DrivenPool(4)
    pool.admit(1, tokens(0, 40))
    reply = pool.send(
        forks=[Fork(1, 2, 40)], releases=[Release(1, last_step=0)], admissions=[Admission(3, tokens(50, 60))]
    )
    assert reply.forked[0].block_ids == (0, 1, 3)
    assert reply.admitted[0].verdict is Verdict.LATER  # only the parent's tail is left, which the watermark keeps


def test_credits_come_from_free_blocks_then_from_the_oldest_cached_ones() -> None:
    pool = DrivenPool(20)
    pool.cache(1, tokens(0, 18 * 16))
    reply = pool.send(credit_target=5)
    assert [block_id for block_id, _ in reply.credits] == [18, 19, 17, 16, 15]
    assert [generation for _, generation in reply.credits] == [1, 1, 2, 2, 2]


def test_credits_leave_the_hot_tenth_of_the_pool_alone() -> None:
    pool = DrivenPool(20)
    pool.cache(1, tokens(0, 20 * 16))
    assert len(pool.send(credit_target=100).credits) == 18
    assert list(pool.pool.blocks.cached) == [1, 0]  # the beginning of the prefix was used last


def test_the_first_credit_of_a_sequence_may_take_a_hot_block() -> None:
    pool = DrivenPool(20)
    pool.cache(1, tokens(0, 19 * 16))
    pool.admit(2, tokens(900, 901))
    assert pool.counts == PoolCounts(free=0, granted=0, active=1, cached=19, quarantined=0)
    assert len(pool.send(credit_target=100).credits) == 17
    for _ in range(17):
        pool.send(spent=[(2, min(pool.pool.blocks.granted))])
    assert len(pool.send(credit_target=100).credits) == 1
    pool.send(spent=[(2, min(pool.pool.blocks.granted))])
    assert len(pool.send(credit_target=100).credits) == 1


def test_a_lone_sequence_grows_to_the_whole_pool() -> None:
    pool = DrivenPool(30)
    pool.cache(1, tokens(0, 30 * 16))
    pool.admit(2, tokens(900, 901))
    for _ in range(29):
        pool.grow(2)
    assert pool.counts == PoolCounts(free=0, granted=0, active=30, cached=0, quarantined=0)


def test_credits_are_topped_up_to_the_target_and_not_beyond() -> None:
    pool = DrivenPool(20)
    assert len(pool.send(credit_target=4).credits) == 4
    assert pool.send(credit_target=4).credits == []
    pool.admit(1, tokens(0, 16))
    pool.send(spent=[(1, min(pool.pool.blocks.granted))], credit_target=4)
    assert pool.counts.granted == 4


def test_credits_above_the_target_are_recalled() -> None:
    pool = DrivenPool(20)
    pool.send(credit_target=4)
    assert pool.send(credit_target=1).num_recalled_credits == 3
    reply = pool.send(returned_credits=[0, 1, 2], credit_target=1)
    assert (reply.num_recalled_credits, reply.counts.granted) == (0, 1)


def test_credits_are_recalled_for_an_admission_that_they_would_let_in() -> None:
    pool = DrivenPool(10)
    pool.admit(1, tokens(0, 16))
    pool.send(credit_target=6)  # 1 active, 6 granted, 3 free
    reply = pool.send(admissions=[Admission(2, tokens(100, 180))], credit_target=9)
    assert reply.admitted[0].verdict is Verdict.LATER
    assert reply.num_recalled_credits == 2
    assert reply.credits == []
    reply = pool.send(returned_credits=[1, 2], admissions=[Admission(2, tokens(100, 180))], credit_target=9)
    assert reply.admitted[0].verdict is Verdict.OK
    assert reply.num_recalled_credits == 0


def test_credits_are_not_recalled_for_an_admission_that_they_would_not_let_in() -> None:
    pool = DrivenPool(10)
    pool.admit(1, tokens(0, 80))
    pool.send(credit_target=2)
    reply = pool.send(admissions=[Admission(2, tokens(100, 180))], credit_target=3)
    assert reply.admitted[0].verdict is Verdict.LATER
    assert reply.num_recalled_credits == 0
    assert len(reply.credits) == 1


def test_a_credit_is_recalled_for_a_fork() -> None:
    pool = DrivenPool(4)
    pool.admit(1, tokens(0, 40))
    [(credit, _)] = pool.send(credit_target=1).credits
    reply = pool.send(forks=[Fork(1, 2, 40)], credit_target=1)
    assert reply.forked[0].verdict is Verdict.LATER
    assert reply.num_recalled_credits == 1
    reply = pool.send(returned_credits=[credit], credit_target=0)
    assert pool.fork(1, 2, 40).verdict is Verdict.OK


@pytest.mark.parametrize(
    "fields",
    [
        {"spent": [(9, 3)]},
        {"spent": [(1, 0)]},
        {"publications": [Publication(9, 16)]},
        {"forks": [Fork(9, 2, 16)]},
        {"releases": [Release(9, 0)]},
        {"releases": [Release(1, 0), Release(1, 0)]},
        {"returned_credits": [0]},
        {"returned_credits": [3, 3]},
        {"returned_credits": [-1]},
        {"admissions": [Admission(1, tokens(0, 16))]},
        {"acknowledged_step": -1},
    ],
)
def test_a_message_with_an_unknown_name_is_refused_and_the_books_still_agree(fields: dict[str, object]) -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    pool.send(credit_target=1)
    assert pool.pool.blocks.granted == {3}
    with pytest.raises(ProtocolError):
        pool.send(**fields)
    assert violations(pool.pool) == []


def test_a_preempted_sequence_gets_its_published_blocks_back() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    pool.publish(1, 32)
    pool.release(1, last_step=5)
    again = pool.admit(1, tokens(0, 50))
    assert again.block_ids[:2] == (0, 1)
    assert again.num_cached_tokens == 32
