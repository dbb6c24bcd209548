"""What the scheduler keeps of a life of its worker and of its KV manager while their links come and go."""

from __future__ import annotations

import itertools

import pytest

from octavo.common.errors import MessageGapError, ProtocolError
from octavo.common.messages.kv import BlockCopy, KvReply, KvRequest, PoolCounts, PoolOpened
from octavo.common.messages.step import StepPlan, StepResult, WorkerHello, WorkerReady
from octavo.scheduler.kv_session import KvSession
from octavo.scheduler.launcher import without_targets
from octavo.scheduler.recycler import Recycler
from octavo.scheduler.worker_session import WorkerSession
from support.sequences import make_running

LIFE = 77


def ready(is_resumed: bool, last_step: int = 0, incarnation: int = LIFE) -> WorkerReady:
    return WorkerReady(incarnation, "m", 8, 16, 4, 32, 64, 97, (), is_resumed=is_resumed, last_step=last_step)


def result(step_id: int) -> StepResult:
    return StepResult(step_id, [], [], compute_us=1, idle_us=0)


def reply(message_no: int) -> KvReply:
    return KvReply(message_no, [], [], [], 0, PoolCounts(8, 0, 0, 0, 0))


def driving_worker(num_plans: int, num_results: int) -> WorkerSession:
    session = WorkerSession(itertools.count(3))
    assert session.hello() == WorkerHello(3)
    assert session.on_ready(ready(is_resumed=False)) is None
    for step_id in range(1, num_plans + 1):
        session.sent(StepPlan(step_id))
    for step_id in range(1, num_results + 1):
        assert session.is_news(result(step_id))
    return session


def test_plans_that_the_worker_lacks_are_sent_again() -> None:
    session = driving_worker(num_plans=5, num_results=2)
    assert session.hello() == WorkerHello(3, LIFE, last_result=2)
    again = session.on_ready(ready(is_resumed=True, last_step=4))
    assert again is not None
    assert [plan.step_id for plan in again] == [5]
    assert session.is_news(result(3))
    assert not session.is_news(result(3))
    with pytest.raises(MessageGapError):
        session.is_news(result(5))


def test_worker_that_starts_over_takes_steps_from_one_under_the_same_epoch() -> None:
    session = driving_worker(num_plans=5, num_results=2)
    assert session.on_ready(ready(is_resumed=False, incarnation=LIFE + 1)) is None
    session.sent(StepPlan(1))
    assert session.is_news(result(1))
    assert session.hello() == WorkerHello(3, LIFE + 1, 1)


def test_after_a_refusal_the_next_hello_asks_for_a_new_life_under_a_higher_epoch() -> None:
    session = driving_worker(num_plans=5, num_results=2)
    session.give_up()
    assert session.hello() == WorkerHello(4, begins_new_life=True)
    session.give_up()  # that hello was not answered
    assert session.hello() == WorkerHello(5, begins_new_life=True)
    session.on_ready(ready(is_resumed=False, incarnation=LIFE + 1))
    assert session.hello() == WorkerHello(5, LIFE + 1)


def test_first_hello_of_a_scheduler_takes_the_blocks_as_they_are() -> None:
    session = WorkerSession(itertools.count(3))
    session.hello()
    session.give_up()  # the answer made no sense
    assert session.hello() == WorkerHello(4)


@pytest.mark.parametrize(
    "answer", [ready(True, last_step=1), ready(True, last_step=6), ready(True, 4, incarnation=LIFE + 1)]
)
def test_resumption_at_an_impossible_place_is_refused(answer: WorkerReady) -> None:
    with pytest.raises(ProtocolError):
        driving_worker(num_plans=5, num_results=2).on_ready(answer)


def test_messages_that_the_kv_manager_lacks_are_sent_again() -> None:
    session = KvSession()
    assert session.on_opened(PoolOpened("p", boot_epoch=9)) is None
    for number in (1, 2, 3):
        session.sent(KvRequest(number, 0))
    assert session.boot_epoch == 0  # cannot be resumed before the first reply
    assert session.is_news(reply(1))
    assert (session.boot_epoch, session.last_reply_no) == (9, 1)
    again = session.on_opened(PoolOpened("p", 9, is_resumed=True, last_message_no=2))
    assert again == [KvRequest(3, 0)]
    assert not session.is_news(reply(1))
    with pytest.raises(MessageGapError):
        session.is_news(reply(3))
    for last_message_no in (0, 4):
        with pytest.raises(ProtocolError):
            session.on_opened(PoolOpened("p", 9, True, last_message_no))


def test_another_kv_manager_is_sent_nothing_again() -> None:
    session = KvSession()
    session.on_opened(PoolOpened("p", boot_epoch=9))
    session.sent(KvRequest(1, 0))
    assert session.on_opened(PoolOpened("p", boot_epoch=10)) is None
    assert not session.has_unanswered
    session.sent(KvRequest(1, 0))
    assert session.is_news(reply(1))
    assert session.boot_epoch == 10


def test_credits_of_ended_sequences_are_recycled_once_their_fence_is_open() -> None:
    """Block 7 came with the admission; 8 is shared by a running sequence; 9 and 10 are free to be used again."""
    recycler = Recycler()
    ended = make_running(block_ids=(7,), slot=0)
    ended.block_table += [8, 9, 10]
    ended.generations += [2, 2, 5]
    running = make_running(block_ids=(8,), slot=1)
    recycler.note(ended, last_step=6, told_in=4)
    assert recycler.recycle(5, [running], set()) == []
    assert recycler.recycle(6, [running], {10}) == [(9, 3)]
    assert recycler.recycled == {9: 3}


def test_recycled_block_may_be_recycled_again_but_not_by_an_old_table() -> None:
    recycler = Recycler()
    for generation in (1, 1, 2):  # twice in tables that shared it, then by its new owner
        ended = make_running(block_ids=(), slot=0)
        ended.block_table, ended.generations = [9], [generation]
        recycler.note(ended, last_step=1, told_in=1)
    assert recycler.recycle(1, [], set()) == [(9, 2)]
    later = make_running(block_ids=(), slot=0)
    later.block_table, later.generations = [9], [2]
    recycler.note(later, last_step=2, told_in=1)
    assert recycler.recycle(2, [], set()) == [(9, 3)]


def test_block_that_a_later_ended_sequence_touched_waits_for_its_fence_too() -> None:
    recycler = Recycler()
    for last_step in (3, 5):
        ended = make_running(block_ids=(), slot=0)
        ended.block_table, ended.generations = [9], [1]
        recycler.note(ended, last_step, told_in=1)
    assert recycler.recycle(3, [], set()) == []
    assert recycler.recycle(5, [], set()) == [(9, 2)]


def test_what_the_kv_manager_took_back_is_not_recycled() -> None:
    recycler = Recycler()
    ended = make_running(block_ids=(), slot=0)
    ended.block_table, ended.generations = [9], [1]
    recycler.note(ended, last_step=1, told_in=3)
    recycler.taken_back(3)
    assert recycler.recycle(1, [], set()) == []


def test_copy_to_a_block_that_is_given_up_is_not_made_and_one_from_it_reads_its_source() -> None:
    copies = [BlockCopy(1, 2, 10, 20), BlockCopy(2, 3, 20, 30), BlockCopy(5, 6, 50, 60)]
    assert without_targets(copies, [2]) == [BlockCopy(1, 3, 10, 30), BlockCopy(5, 6, 50, 60)]
    assert without_targets(copies, [6]) == copies[:2]
