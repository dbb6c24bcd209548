"""Block tables: growth, forks and copy-on-write, publication, release."""

from __future__ import annotations

import itertools

import pytest

from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import BlockCopy, Fork, Publication, Release, Verdict
from support.pools import DrivenPool, tokens


def test_a_fork_shares_full_blocks_and_copies_the_tail() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    forked = pool.fork(1, 2, 40)
    assert forked.block_ids == (0, 1, 3)
    assert forked.generations == (1, 1, 1)
    assert forked.copy == BlockCopy(2, 3, source_generation=1, target_generation=1)
    assert [pool.pool.blocks.ref_counts[block_id] for block_id in range(4)] == [2, 2, 1, 1]


def test_a_fork_at_a_block_border_copies_nothing() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    forked = pool.fork(1, 2, 32)
    assert forked.block_ids == (0, 1)
    assert forked.copy is None


def test_a_fork_inside_the_first_block_shares_none() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    forked = pool.fork(1, 2, 5)
    assert forked.block_ids == (3,)
    assert forked.copy == BlockCopy(0, 3, source_generation=1, target_generation=1)


def test_a_fork_that_goes_on_gets_the_blocks_of_its_own_tokens_or_none() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    forked = pool.fork(1, 2, 20, num_table_tokens=65)
    assert forked.block_ids == (0, 3, 4, 5, 6)
    assert forked.copy == BlockCopy(1, 3, source_generation=1, target_generation=1)
    refused = pool.fork(1, 3, 20, num_table_tokens=49)
    assert refused.verdict is Verdict.LATER
    assert pool.counts.free == 1


def test_a_fork_of_a_fork_shares_with_both() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 32))
    pool.fork(1, 2, 32)
    pool.fork(2, 3, 32)
    assert [pool.pool.blocks.ref_counts[block_id] for block_id in (0, 1)] == [3, 3]


@pytest.mark.parametrize("closing_order", list(itertools.permutations([1, 2, 3])))
def test_forked_sequences_free_each_block_once_in_any_order(closing_order: tuple[int, ...]) -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 40))
    pool.fork(1, 2, 40)
    pool.fork(1, 3, 40)
    for sequence_id in (1, 2, 3):
        pool.grow(sequence_id)  # 40 tokens grow by 20: 8 fit the tail, 12 a new block
    assert len({pool.table(sequence_id)[2] for sequence_id in (1, 2, 3)}) == 3
    assert pool.counts.active == 2 + 3 + 3
    for sequence_id in closing_order:
        pool.release(sequence_id)
    assert pool.counts.active == 0
    assert pool.counts.free == 16


def test_a_preempted_fork_group_frees_each_block_once() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 40))
    pool.fork(1, 2, 40)
    pool.release(1, 2, last_step=4)
    assert pool.counts.quarantined == 4
    pool.send(acknowledged_step=4)
    assert pool.counts.free == 16


def test_a_fork_that_finds_no_block_for_its_copy_is_told_later() -> None:
    pool = DrivenPool(3)
    pool.admit(1, tokens(0, 40))
    forked = pool.fork(1, 2, 40)
    assert forked.verdict is Verdict.LATER
    assert forked.block_ids == ()
    assert pool.counts.active == 3
    assert pool.fork(1, 2, 32).verdict is Verdict.OK


def test_a_parent_may_be_forked_and_released_in_one_message() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    reply = pool.send(forks=[Fork(1, 2, 40)], releases=[Release(1, last_step=0)])
    assert reply.forked[0].block_ids == (0, 1, 3)
    assert pool.counts.active == 3


def test_parent_and_child_publish_shared_blocks_once_and_their_own_apart() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 40))
    pool.fork(1, 2, 40)
    pool.publish(1, 48, tokens(40, 48))
    pool.publish(2, 48, tokens(140, 148))
    assert pool.admit(3, tokens(0, 60)).block_ids[:3] == (0, 1, 2)
    assert pool.admit(4, (*tokens(0, 40), *tokens(140, 148), 9)).block_ids[:3] == (0, 1, 3)


def test_a_child_does_not_know_what_the_parent_is_told_later() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 16))
    pool.grow(1)
    pool.fork(1, 2, 20)  # tokens 16 to 19 were not told yet
    pool.publish(1, 32, tokens(16, 32))
    pool.grow(2)
    pool.publish(2, 32, (*tokens(16, 20), *tokens(80, 92)))
    assert pool.admit(3, (*tokens(0, 20), *tokens(80, 93))).num_cached_tokens == 32
    assert pool.admit(4, tokens(0, 33)).num_cached_tokens == 32


def test_a_fork_before_the_parents_published_blocks_publishes_its_own() -> None:
    pool = DrivenPool(16)
    pool.admit(1, tokens(0, 48))
    pool.publish(1, 48)
    pool.fork(1, 2, 20)
    pool.publish(2, 32, tokens(80, 92))
    assert pool.admit(3, (*tokens(0, 20), *tokens(80, 93))).num_cached_tokens == 32


@pytest.mark.parametrize(
    ("fork", "complaint"),
    [
        (Fork(9, 2, 16), "sequence 9 holds no table"),
        (Fork(1, 1, 16), "sequence 1 holds a table already"),
        (Fork(1, 2, 0), "at 0 tokens"),
        (Fork(1, 2, 49), "at 49 tokens"),
    ],
)
def test_an_impossible_fork_changes_nothing(fork: Fork, complaint: str) -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    with pytest.raises(ProtocolError, match=complaint):
        pool.send(forks=[fork])
    assert pool.counts.active == 3


def test_a_parent_released_before_cannot_be_forked() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    pool.release(1)
    with pytest.raises(ProtocolError, match="sequence 1 holds no table"):
        pool.fork(1, 2, 40)


def test_spent_credits_stand_at_the_end_in_order() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 16))
    reply = pool.send(credit_target=3)
    assert reply.credits == [(1, 1), (2, 1), (3, 1)]
    pool.send(spent=[(1, 3), (1, 1)])
    assert pool.table(1) == [0, 3, 1]


def test_a_sequence_that_ends_as_it_fills_a_block_spends_publishes_and_releases_in_one_message() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 16))
    [(credit, _)] = pool.send(credit_target=1).credits
    pool.send(
        spent=[(1, credit)],
        publications=[Publication(1, 32, tokens(16, 32))],
        releases=[Release(1, last_step=0)],
    )
    assert pool.counts.cached == 2
    assert pool.admit(2, tokens(0, 33)).num_cached_tokens == 32


@pytest.mark.parametrize(
    ("publication", "complaint"),
    [
        (Publication(9, 16), "sequence 9 holds no table"),
        (Publication(1, 64), "longer than its table"),
        (Publication(1, 40, tokens(40, 49)), "longer than its table"),
        (Publication(1, 48), "48 tokens computed, 40 told"),
    ],
)
def test_an_impossible_publication_changes_nothing(publication: Publication, complaint: str) -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    with pytest.raises(ProtocolError, match=complaint):
        pool.send(publications=[publication])
    assert pool.pool.blocks.key_to_block == {}


def test_a_publication_again_or_of_less_changes_nothing() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    for num_computed_tokens in (32, 32, 16, 0, 40):
        pool.publish(1, num_computed_tokens)
    assert len(pool.pool.blocks.key_to_block) == 2


def test_an_unknown_sequence_cannot_be_released() -> None:
    with pytest.raises(ProtocolError, match="sequence 1 holds no table"):
        DrivenPool(8).release(1)
