"""Prompts are hashed off the step, and wait for nobody else's hashing."""

from __future__ import annotations

import pytest

from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import Admission, Arrival, Verdict, WaitReason
from octavo.kvmanager.arrivals import SLICE_TOKENS, STEP_TOKENS
from support.pools import DrivenPool, tokens


def test_a_short_prompt_arrives_and_is_admitted_in_one_message() -> None:
    pool = DrivenPool(8)
    [answer] = pool.send(arrivals=[Arrival(1, tokens(0, 40))], admissions=[Admission(1)]).admitted
    assert (answer.verdict, answer.block_ids) == (Verdict.OK, (0, 1, 2))
    assert not pool.pool.hash_slice()


def test_a_long_prompt_is_hashed_in_slices_and_holds_up_nobody() -> None:
    pool = DrivenPool(1000)
    long = tokens(0, 3 * SLICE_TOKENS)
    reply = pool.send(
        arrivals=[Arrival(1, long), Arrival(2, tokens(90_000, 90_020))], admissions=[Admission(1), Admission(2)]
    )
    assert [answer.wait_reason for answer in reply.admitted] == [WaitReason.HASHING, WaitReason.NONE]
    assert [pool.pool.hash_slice() for _ in range(3)] == [True, True, False]
    assert pool.admit(1).verdict is Verdict.OK


def test_slices_go_round_so_that_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    pool = DrivenPool(1000)
    pool.send(arrivals=[Arrival(1, tokens(0, 3 * SLICE_TOKENS)), Arrival(2, tokens(0, STEP_TOKENS + 16))])
    pool.pool.hash_slice()
    pool.pool.hash_slice()
    assert pool.admit(2).verdict is Verdict.OK
    assert pool.admit(1, waits=True).wait_reason is WaitReason.HASHING


def test_asking_again_ends_in_blocks_even_without_slices() -> None:
    pool = DrivenPool(1000)
    pool.arrive(1, tokens(0, 2 * STEP_TOKENS))
    answers = [pool.admit(1).verdict for _ in range(2)]
    assert answers == [Verdict.LATER, Verdict.OK]


def test_a_sequence_that_only_arrived_is_released() -> None:
    pool = DrivenPool(8)
    pool.arrive(1, tokens(0, 40))
    pool.release(1)
    assert len(pool.pool.arrivals) == 0
    with pytest.raises(ProtocolError):
        pool.release(1)


def test_a_preempted_sequence_arrives_anew_in_the_message_that_releases_it() -> None:
    pool = DrivenPool(8)
    pool.arrive(1, tokens(0, 40))
    pool.admit(1)
    pool.publish(1, 40)
    reply = pool.release(1)
    assert reply.counts.cached == 2
    pool.arrive(1, tokens(0, 45))
    assert pool.admit(1).num_cached_tokens == 32


@pytest.mark.parametrize("again", [tokens(0, 40), ()])
def test_an_arrival_that_cannot_be_is_refused(again: tuple[int, ...]) -> None:
    pool = DrivenPool(8)
    pool.arrive(1, tokens(0, 40))
    with pytest.raises(ProtocolError):
        pool.arrive(1 if again else 2, again)


def test_a_sequence_with_a_table_does_not_arrive() -> None:
    pool = DrivenPool(8)
    pool.admit(1, tokens(0, 40))
    with pytest.raises(ProtocolError, match="holds a table"):
        pool.arrive(1, tokens(0, 40))


def test_what_can_never_fit_is_forgotten() -> None:
    pool = DrivenPool(2)
    pool.arrive(1, tokens(0, 40))
    assert pool.admit(1).verdict is Verdict.NEVER
    assert len(pool.pool.arrivals) == 0
