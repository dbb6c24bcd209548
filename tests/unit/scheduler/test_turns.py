"""Fairness between tenants: the bounds that the queue promises, for any arrivals."""

from __future__ import annotations

import math
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from octavo.scheduler.queues import WaitingQueue
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.turns import Turns
from support.sequences import make_sequence

WEIGHTS = {"a": 1, "b": 1, "c": 3, "d": 7}
TENANTS = st.sampled_from(sorted(WEIGHTS))
BURSTS = st.tuples(TENANTS, st.integers(1, 30))
SERVE = st.none()


def arrive(queue: WaitingQueue, tenant: str, priority: int = 0) -> Sequence:
    turn = queue.take_turns(tenant, WEIGHTS.get(tenant, 1), priority)
    sequence = make_sequence(turn=turn)
    sequence.request.tenant = tenant
    sequence.priority = priority
    queue.push(sequence)
    return sequence


def serve(queue: WaitingQueue) -> Sequence:
    assert queue.peek() is not None
    sequence = queue.pop()
    sequence.state = SequenceState.RUNNING
    return sequence


@given(st.lists(st.one_of(BURSTS, st.integers(1, 20)), min_size=4, max_size=20), TENANTS, st.lists(TENANTS))
def test_a_request_waits_for_no_more_of_each_other_tenant_than_its_own_line_and_the_weights_say(
    past: list[tuple[str, int] | int], tenant: str, later: list[str]
) -> None:
    """Whatever came and was served before, and whatever comes while it waits."""
    queue = WaitingQueue()
    for event in past:
        if isinstance(event, tuple):
            for _ in range(event[1]):
                arrive(queue, event[0])
        else:
            for _ in range(min(event, len(queue))):
                serve(queue)
    num_of_its_own = sum(one.request.tenant == tenant for one in queue)
    mine, coming = arrive(queue, tenant), deque(later)
    before: dict[str, int] = dict.fromkeys(WEIGHTS, 0)
    while (served := serve(queue)) is not mine:
        before[served.request.tenant] += 1
        if coming:
            arrive(queue, coming.popleft())
    assert before.pop(tenant) == num_of_its_own
    for other, count in before.items():
        assert count <= math.ceil((num_of_its_own + 1) * WEIGHTS[other] / WEIGHTS[tenant]) + 1


@given(st.lists(st.one_of(st.tuples(TENANTS, st.integers(-2, 2)), SERVE), max_size=80))
def test_all_are_served_once_and_each_tenants_by_age_within_a_priority(
    events: list[tuple[str, int] | None],
) -> None:
    queue = WaitingQueue()
    arrived: list[Sequence] = []
    served: list[Sequence] = []
    for event in events:
        if event is not None:
            arrived.append(arrive(queue, *event))
        elif queue.peek() is not None:
            served.append(serve(queue))
    while queue.peek() is not None:
        served.append(serve(queue))
    assert len(queue) == 0
    assert not any(queue.has_any_of(tenant) for tenant in WEIGHTS)
    for tenant in WEIGHTS:
        for priority in range(-2, 3):
            mine = [one for one in arrived if (one.request.tenant, one.priority) == (tenant, priority)]
            assert [one for one in served if one in mine] == mine


def test_two_tenants_in_line_are_served_by_their_weights() -> None:
    queue = WaitingQueue()
    for _ in range(60):
        for tenant in ("a", "c"):
            arrive(queue, tenant)
    first = [serve(queue).request.tenant for _ in range(40)]
    assert 29 <= first.count("c") <= 31


def test_urgent_requests_of_one_tenant_do_not_put_off_another_at_its_own_priority() -> None:
    queue = WaitingQueue()
    patient = [arrive(queue, "a") for _ in range(50)]
    for _ in range(500):
        arrive(queue, "b", priority=-5)
        serve(queue)
    lone = arrive(queue, "d")
    assert [serve(queue), serve(queue)] == [patient[0], lone]


def test_a_line_that_was_empty_begins_where_the_others_are() -> None:
    queue = WaitingQueue()
    arrive(queue, "a")
    for _ in range(500):
        arrive(queue, "b", priority=-5)
        serve(queue)
    while queue.peek() is not None:
        serve(queue)
    first, second = arrive(queue, "a"), arrive(queue, "d")
    assert min(first.turn, second.turn) >= 499


def test_a_preempted_request_that_returns_gives_no_turns_away() -> None:
    queue = WaitingQueue()
    old = arrive(queue, "a")
    serve(queue)
    for _ in range(100):
        arrive(queue, "a")
        serve(queue)
    crowd = [arrive(queue, "a") for _ in range(3)]
    queue.push(old)
    newcomers = [arrive(queue, "b") for _ in range(3)]
    assert [serve(queue) for _ in range(4)] == [old, newcomers[0], crowd[0], newcomers[1]]


@given(st.lists(st.tuples(st.text(max_size=2), st.integers(1, 5)), max_size=300))
def test_idle_tenants_are_forgotten(requests: list[tuple[str, int]]) -> None:
    """Each is served at once, so at most the last few are remembered."""
    turns = Turns()
    served = 0.0
    for tenant, weight in requests:
        served = max(served, turns.take(tenant, weight, 1, served))
        assert len(turns) <= 65
