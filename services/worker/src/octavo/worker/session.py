"""One life of the worker's pool as its scheduler sees it: it outlives the link."""

from __future__ import annotations

import enum

from octavo.common.messages.step import StepPlan, StepRefused, StepResult, WorkerHello


class PlanFate(enum.Enum):
    """What becomes of a plan that came in."""

    RUN = enum.auto()  # the next one, or one that the core must refuse
    DUPLICATE = enum.auto()  # accepted before; what its step brought is in `stored`, or will come


class WorkerSession:
    """Knows which plans were accepted, and keeps every result until the scheduler has acknowledged it.

    A link that ends leaves the session as it is: plans that were accepted run, and their results wait. A hello that
    names the session's incarnation goes on where the lost link ended; any other begins a new session.
    """

    def __init__(self, epoch: int, incarnation: int) -> None:
        self.epoch = epoch
        self.incarnation = incarnation
        self.last_step = 0
        """Last plan accepted."""
        self._results: dict[int, StepResult] = {}
        """Not acknowledged, by step."""
        self._acknowledged_step = 0
        self._is_refused = False

    def accept(self, plan: StepPlan) -> PlanFate:
        """Take note of a plan. After a gap nothing is accepted any more."""
        if plan.step_id <= self.last_step:
            return PlanFate.DUPLICATE
        if plan.step_id != self.last_step + 1:
            self._is_refused = True
        if not self._is_refused:
            self.last_step = plan.step_id
            self._acknowledge(plan.acknowledged_step)
        return PlanFate.RUN

    def stored(self, step_id: int) -> StepResult | None:
        """The result of an accepted plan: None if the step runs, or if the result was acknowledged."""
        return self._results.get(step_id)

    def keep(self, reply: StepResult | StepRefused) -> None:
        """Store what a step brought, whether or not a link is there to send it on."""
        if isinstance(reply, StepResult):
            self._results[reply.step_id] = reply
        else:
            self._is_refused = True

    def can_resume(self, hello: WorkerHello) -> bool:
        """Whether this hello goes on with the session: same scheduler, same life, and no result it lacks is gone."""
        return (
            not self._is_refused
            and hello.resume_incarnation == self.incarnation
            and hello.epoch == self.epoch
            and self._acknowledged_step <= hello.last_result <= self.last_step
        )

    def resume(self, hello: WorkerHello) -> list[StepResult]:
        """The results that the lost link did not bring, oldest first."""
        self._acknowledge(hello.last_result)
        return list(self._results.values())

    def _acknowledge(self, step: int) -> None:
        for step_id in range(self._acknowledged_step + 1, step + 1):
            self._results.pop(step_id, None)
        self._acknowledged_step = max(self._acknowledged_step, step)
