"""Credits in hand, news for the KV manager, and what its replies say."""

from __future__ import annotations

from array import array

import pytest

from octavo.common.errors import MessageGapError
from octavo.common.messages.kv import Admission, Arrival, Fork, KvReply, KvRequest, PoolCounts, Publication, Release
from octavo.scheduler.block_account import BlockAccount
from support.sequences import make_running, make_sequence

FULL = PoolCounts(free=0, granted=0, active=100, cached=0, quarantined=0)


def reply(
    message_no: int,
    credits: tuple[tuple[int, int], ...] = (),
    num_recalled: int = 0,
    counts: PoolCounts = FULL,
) -> KvReply:
    return KvReply(message_no, [], [], list(credits), num_recalled, counts)


def sent(account: BlockAccount, acknowledged_step: int = 1, credit_target: int = 0) -> KvRequest:
    request = account.take_request(acknowledged_step, credit_target, is_starving=False)
    assert request is not None
    return request


def account_with_credits(*credits: tuple[int, int]) -> BlockAccount:
    account = BlockAccount(num_blocks=100, block_size=4)
    sent(account, acknowledged_step=1)
    account.on_reply(reply(1, credits))
    return account


def test_nothing_to_say_is_no_message() -> None:
    account = BlockAccount(num_blocks=100, block_size=4)
    assert account.take_request(0, 8, is_starving=False) is None


def test_acknowledged_step_is_told_once() -> None:
    account = BlockAccount(num_blocks=100, block_size=4)
    assert sent(account, acknowledged_step=3) == KvRequest(1, 3)
    assert account.take_request(3, 0, is_starving=False) is None
    assert sent(account, acknowledged_step=4).message_no == 2


def test_credit_is_spent_at_the_border_of_a_block_and_told_with_the_next_message() -> None:
    account = account_with_credits((70, 1), (71, 5))
    sequence = make_running(block_ids=(10, 11, 12), slot=0)
    assert account.has_block_for(sequence, 11)
    assert sequence.block_table == [10, 11, 12]
    assert account.has_block_for(sequence, 12)
    assert (sequence.block_table, sequence.generations) == ([10, 11, 12, 70], [10, 11, 12, 1])
    assert sent(account).spent == [(sequence.sequence_id, 70)]


def test_without_credits_a_decode_sits_out() -> None:
    account = account_with_credits()
    sequence = make_running(block_ids=(10,), slot=0)
    assert not account.has_block_for(sequence, 4)
    assert sequence.block_table == [10]


def test_full_blocks_are_published_once_with_the_tokens_that_the_manager_lacks() -> None:
    account = account_with_credits()
    sequence = make_running(6, block_ids=(10, 11), slot=0)
    sequence.num_told_tokens = 6
    sequence.num_computed_tokens = 6
    account.publish(sequence)
    assert sent(account).publications == [Publication(sequence.sequence_id, 6, ())]
    sequence.token_ids.extend([50, 51, 52])
    sequence.num_computed_tokens = 7
    account.publish(sequence)
    assert account.take_request(1, 0, is_starving=False) is None
    sequence.num_computed_tokens = 8
    account.publish(sequence)
    assert sent(account).publications == [Publication(sequence.sequence_id, 8, (50, 51))]


def test_a_fork_that_goes_on_with_a_prompt_asks_for_its_blocks_too() -> None:
    account = account_with_credits()
    parent, child = make_running(10, block_ids=(10, 11, 12), slot=0), make_running(12, block_ids=(), slot=1)
    parent.num_told_tokens, parent.num_published_blocks = 10, 2
    account.fork(parent, child, 7)
    assert sent(account).forks == [Fork(parent.sequence_id, child.sequence_id, 7, num_table_tokens=12)]
    assert (child.num_shared_tokens, child.num_told_tokens, child.num_published_blocks) == (7, 7, 1)


def test_what_a_parent_publishes_in_the_message_of_a_fork_is_told_of_the_child_too() -> None:
    account = account_with_credits()
    parent, child = make_running(9, block_ids=(10, 11, 12), slot=0), make_running(8, block_ids=(), slot=1)
    parent.num_told_tokens, parent.num_computed_tokens = 5, 7
    account.fork(parent, child, 7)
    parent.num_computed_tokens = 8
    account.publish(parent)
    request = sent(account)
    assert request.publications == [Publication(parent.sequence_id, 8, tuple(parent.token_ids[5:8]))]
    assert (child.num_told_tokens, child.num_published_blocks) == (7, 1)


def test_everything_of_a_step_is_in_one_message() -> None:
    account = account_with_credits((70, 1))
    parent, child, ended, fresh = (make_running(block_ids=(10,), slot=0) for _ in range(4))
    account.fork(parent, child, 9)
    account.release(ended, last_step=9)
    account.admit(fresh, computes_itself=False)
    request = sent(account, acknowledged_step=8, credit_target=6)
    assert request == KvRequest(
        message_no=2,
        acknowledged_step=8,
        forks=[Fork(parent.sequence_id, child.sequence_id, 9)],
        releases=[Release(ended.sequence_id, 9)],
        admissions=[Admission(fresh.sequence_id)],
        arrivals=[Arrival(fresh.sequence_id, array("i", range(10)))],
        credit_target=6,
        last_reply_no=1,
    )


def test_recalled_credits_go_back_the_latest_first() -> None:
    account = account_with_credits((70, 1), (71, 1), (72, 1))
    account.admit(make_sequence(), computes_itself=False)
    sent(account)
    account.on_reply(reply(2, num_recalled=2))
    assert sent(account).returned_credits == [72, 71]


def test_recall_of_credits_that_were_spent_meanwhile_gives_back_what_is_left() -> None:
    account = account_with_credits((70, 1))
    account.has_block_for(make_running(block_ids=(), slot=0), 0)
    sent(account)
    account.on_reply(reply(2, num_recalled=5))
    assert account.take_request(1, 0, is_starving=False) is None


def test_missing_reply_is_an_error() -> None:
    account = account_with_credits()
    with pytest.raises(MessageGapError):
        account.on_reply(reply(3))


def test_pool_is_dry_only_when_nothing_is_on_its_way_back() -> None:
    account = account_with_credits()
    assert account.is_dry
    account.release(make_running(block_ids=(10,), slot=0), last_step=1)
    assert not account.is_dry, "a release is to be sent"
    sent(account)
    assert not account.is_dry, "the reply may bring blocks"
    account.on_reply(reply(2, counts=PoolCounts(0, 0, 99, 0, 1)))
    assert not account.is_dry, "a block is in quarantine"
    sent(account, acknowledged_step=2)
    account.on_reply(reply(3, counts=PoolCounts(0, 0, 99, 1, 0)))
    assert not account.is_dry, "a cached block can be had"


def test_starving_scheduler_asks_again_only_if_blocks_are_to_be_had() -> None:
    account = account_with_credits()
    assert account.take_request(1, 2, is_starving=True) is None
    sent(account, acknowledged_step=2)
    account.on_reply(reply(2, counts=PoolCounts(1, 0, 99, 0, 0)))
    assert account.take_request(2, 2, is_starving=True) == KvRequest(3, 2, credit_target=2, last_reply_no=2)


def test_refused_admission_is_tried_again_when_more_is_free() -> None:
    account = account_with_credits()
    assert not account.may_fit_now(allocatable_at_later=0)
    sent(account, acknowledged_step=2)
    account.on_reply(reply(2, counts=PoolCounts(2, 0, 98, 0, 0)))
    assert account.may_fit_now(allocatable_at_later=1)
    assert not account.may_fit_now(allocatable_at_later=2)
