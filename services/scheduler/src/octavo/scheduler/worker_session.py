"""The scheduler's side of one life of the worker's pool: it outlives the link to the worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from octavo.common.errors import MessageGapError, ProtocolError
from octavo.common.messages.step import StepPlan, StepResult, WorkerHello, WorkerReady


class WorkerSession:
    """Keeps each plan until its result is here, so that a new link can go on where the lost one ended."""

    def __init__(self, epochs: Iterator[int]) -> None:
        """`epochs` are fencing numbers, each higher than all before it and than those of any earlier scheduler."""
        self._epochs = epochs
        self.epoch = 0
        self.incarnation = 0
        """The worker's life that this scheduler drives; 0 before the first and when the next hello starts over."""
        self._begins_new_life = False
        """The next hello asks for one."""
        self._last_result = 0
        self._plans: deque[StepPlan] = deque()

    def hello(self) -> WorkerHello:
        """The first message on a new link."""
        if not self.incarnation:
            self.epoch = next(self._epochs)
        return WorkerHello(self.epoch, self.incarnation, self._last_result, self._begins_new_life)

    def on_ready(self, ready: WorkerReady) -> list[StepPlan] | None:
        """The plans to send again, or None if the worker starts over. Raises ProtocolError if that cannot be."""
        if not ready.incarnation:
            raise ProtocolError("the worker tells no incarnation")
        if ready.is_resumed:
            last_sent = self._last_result + len(self._plans)
            if ready.incarnation != self.incarnation or not self._last_result <= ready.last_step <= last_sent:
                raise ProtocolError(
                    f"the worker resumes at step {ready.last_step} of life {ready.incarnation:x}; here it is life"
                    f" {self.incarnation:x}, result {self._last_result}, plan {last_sent}"
                )
            return [plan for plan in self._plans if plan.step_id > ready.last_step]
        self._forget()
        self.incarnation = ready.incarnation
        self._begins_new_life = False
        return None

    def give_up(self) -> None:
        """Something is wrong with this life, if there is one: the next hello begins a new one. The first hello of a
        scheduler takes the worker's blocks as they are."""
        self._begins_new_life = self._begins_new_life or bool(self.incarnation)
        self._forget()

    def _forget(self) -> None:
        self.incarnation = self._last_result = 0
        self._plans.clear()

    def sent(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def is_news(self, result: StepResult) -> bool:
        """Whether the result is the next one; False for one that was received before. Raises MessageGapError."""
        if result.step_id <= self._last_result:
            return False
        if not self._plans or result.step_id != self._plans[0].step_id:
            raise MessageGapError(f"result of step {result.step_id} after that of step {self._last_result}")
        self._plans.popleft()
        self._last_result = result.step_id
        return True
