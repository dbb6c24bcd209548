"""The waiting queue and the slots."""

from __future__ import annotations

from octavo.scheduler.queues import TURNS_PER_PRIORITY, Slots, WaitingQueue
from octavo.scheduler.sequence import SequenceState
from support.sequences import make_sequence


def test_oldest_request_is_next() -> None:
    queue = WaitingQueue()
    third, first, second = (make_sequence(turn=number) for number in (3, 1, 2))
    for sequence in (third, first, second):
        queue.push(sequence)
    assert [queue.pop() for _ in range(3) if queue.peek()] == [first, second, third]
    assert (len(queue), queue.peek()) == (0, None)


def test_a_low_priority_waits_for_so_many_later_ones_and_no_more() -> None:
    """However many urgent ones keep coming."""
    queue = WaitingQueue()
    patient = make_sequence(turn=1)
    patient.priority = 2
    queue.push(patient)
    num_served_before = 0
    for number in range(2, 2 + 3 * TURNS_PER_PRIORITY):
        queue.push(make_sequence(turn=number))
        if queue.pop() is patient:
            break
        num_served_before += 1
    assert num_served_before == 2 * TURNS_PER_PRIORITY - 1


def test_preempted_sequence_comes_back_to_its_old_place() -> None:
    queue = WaitingQueue()
    first, second = make_sequence(turn=1), make_sequence(turn=2)
    queue.push(first)
    queue.push(second)
    assert queue.peek() is first
    queue.pop().state = SequenceState.RUNNING
    assert queue.peek() is second
    queue.push(first)
    assert queue.peek() is first
    assert first.state is SequenceState.WAITING


def test_sequence_that_ends_while_it_waits_is_passed_over() -> None:
    queue = WaitingQueue()
    first, second, third = (make_sequence(turn=number) for number in (1, 2, 3))
    for sequence in (first, second, third):
        queue.push(sequence)
    queue.discard(first)
    queue.discard(third)
    assert len(queue) == 1
    assert queue.peek() is second
    queue.pop()
    assert (len(queue), queue.peek()) == (0, None)


def test_choices_of_one_request_leave_in_the_order_in_which_they_were_made() -> None:
    queue = WaitingQueue()
    first, second = make_sequence(turn=1), make_sequence(turn=1)
    queue.push(second)
    queue.push(first)
    assert queue.peek() is first


def test_slot_that_the_worker_holds_open_is_closed_by_the_next_plan_only_once() -> None:
    slots = Slots(2)
    assert (slots.take(), slots.take(), slots.num_free) == (0, 1, 0)
    slots.give_back(0, is_open=True)
    slots.give_back(1, is_open=False)
    assert slots.num_free == 2
    assert slots.drain_closed() == [0]
    assert slots.drain_closed() == []


def test_slot_freed_before_a_plan_may_be_taken_for_the_same_plan() -> None:
    slots = Slots(1)
    slots.give_back(slots.take(), is_open=True)
    assert slots.take() == 0
    assert slots.drain_closed() == [0]
