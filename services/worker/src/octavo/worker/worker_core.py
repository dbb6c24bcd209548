"""The worker's side of the step protocol: steps are contiguous, and one refusal refuses all later plans."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import structlog

from octavo.common.errors import InternalError, MessageGapError, OctavoError, ProtocolError
from octavo.common.messages.step import StepPlan, StepRefused
from octavo.worker.runner import LaunchedStep, Runner, StepSamples

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a scheduler is told of the model."""

    name: str
    eos_token_ids: tuple[int, ...]
    kv_format: str = ""
    """See WorkerReady."""


class WorkerCore:
    """Runs the plans of one scheduler at a time, in the order in which they come."""

    def __init__(self, runner: Runner, model: ServedModel) -> None:
        self.runner = runner
        self.model = model
        self.incarnation = _new_incarnation()
        """One life of the pool."""
        self._next_step_id = 1
        self._refusal: StepRefused | None = None

    def start_over(self, *, begins_new_life: bool) -> None:
        """All slots are closed, and steps count from 1. The pool keeps what it holds, unless a new life is asked for or
        a plan was refused: then scheduler and worker may not be of one mind about it."""
        if begins_new_life or self._refusal is not None:
            self.runner.reset()
            self.incarnation = _new_incarnation()
        else:
            self.runner.close_slots()
        self._next_step_id = 1
        self._refusal = None

    def run(self, plan: StepPlan) -> StepSamples | StepRefused:
        """Run one plan to its end."""
        launched = self.launch(plan)
        return launched if isinstance(launched, StepRefused) else self.wait(plan, launched)

    def launch(self, plan: StepPlan) -> LaunchedStep | StepRefused:
        """Begin one plan. Whatever goes wrong is an answer, and later plans are refused until `start_over`."""
        if self._refusal is not None:
            first = self._refusal
            return StepRefused(plan.step_id, first.reason, f"step {first.step_id} was refused: {first.message}")
        try:
            if plan.step_id != self._next_step_id:
                raise MessageGapError(f"step {plan.step_id} came when {self._next_step_id} was due")
            launched = self.runner.launch(plan)
        except ProtocolError as error:
            return self._refuse(plan, error)
        except Exception:
            return self._fail(plan)
        self._next_step_id += 1
        return launched

    def wait(self, plan: StepPlan, launched: LaunchedStep) -> StepSamples | StepRefused:
        """The outcome of a launched plan. Any thread may wait, in the order of launches."""
        try:
            return launched.wait()
        except Exception:
            return self._fail(plan)

    def _fail(self, plan: StepPlan) -> StepRefused:
        log.exception("step failed", step_id=plan.step_id)
        return self._refuse(plan, InternalError("the step failed; the worker's log has the cause"))

    def _refuse(self, plan: StepPlan, error: OctavoError) -> StepRefused:
        log.warning("plan refused", step_id=plan.step_id, reason=error.reason, error=error.message)
        self._refusal = StepRefused(plan.step_id, error.reason, error.message)
        return self._refusal


def _new_incarnation() -> int:
    return 1 + secrets.randbelow(2**64 - 1)
