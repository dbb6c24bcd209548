"""One life of the worker's pool over several links: what is accepted, kept, answered again."""

from __future__ import annotations

import pytest

from octavo.common.messages.step import StepPlan, StepRefused, StepResult, WorkerHello
from octavo.worker.session import PlanFate, WorkerSession

LIFE = 77


def result(step_id: int) -> StepResult:
    return StepResult(step_id, [step_id], [], compute_us=1, idle_us=0)


def session_after(num_plans: int, num_results: int, acknowledged: int = 0) -> WorkerSession:
    """Plans 1 to `num_plans` were accepted, the last of which acknowledges, and the first results are there."""
    session = WorkerSession(epoch=5, incarnation=LIFE)
    for step_id in range(1, num_plans + 1):
        plan = StepPlan(step_id, acknowledged_step=acknowledged if step_id == num_plans else 0)
        assert session.accept(plan) is PlanFate.RUN
    for step_id in range(1, num_results + 1):
        session.keep(result(step_id))
    return session


def test_results_after_the_last_one_received_come_again() -> None:
    session = session_after(num_plans=4, num_results=3)
    hello = WorkerHello(5, LIFE, last_result=1)
    assert session.can_resume(hello)
    assert session.resume(hello) == [result(2), result(3)]
    assert session.last_step == 4


def test_repeated_plan_is_answered_from_store_once_its_result_is_there() -> None:
    session = session_after(num_plans=2, num_results=1)
    assert session.accept(StepPlan(1)) is PlanFate.DUPLICATE
    assert session.stored(1) == result(1)
    assert session.accept(StepPlan(2)) is PlanFate.DUPLICATE
    assert session.stored(2) is None


def test_acknowledged_results_are_dropped() -> None:
    session = session_after(num_plans=3, num_results=2)
    session.accept(StepPlan(4, acknowledged_step=1))
    assert session.stored(1) is None
    assert session.stored(2) == result(2)


@pytest.mark.parametrize(
    "hello",
    [
        WorkerHello(5, 0, 0),  # asks to start over
        WorkerHello(5, LIFE + 1, 2),  # another life
        WorkerHello(6, LIFE, 2),  # another scheduler
        WorkerHello(5, LIFE, 0),  # lacks result 1, which is gone
        WorkerHello(5, LIFE, 4),  # has a result of a plan that never came
    ],
)
def test_any_other_hello_starts_over(hello: WorkerHello) -> None:
    session = session_after(num_plans=3, num_results=2, acknowledged=1)
    assert session.can_resume(WorkerHello(5, LIFE, 2))
    assert not session.can_resume(hello)


def test_nothing_is_resumed_after_a_gap_or_a_refusal() -> None:
    gap = session_after(num_plans=1, num_results=1)
    assert gap.accept(StepPlan(3)) is PlanFate.RUN  # the core refuses it
    assert gap.accept(StepPlan(2)) is PlanFate.RUN  # and whatever follows
    assert gap.last_step == 1
    refused = session_after(num_plans=2, num_results=1)
    refused.keep(StepRefused(2, "STALE_BLOCK", "block 3"))
    for session in (gap, refused):
        assert not session.can_resume(WorkerHello(5, LIFE, 1))
