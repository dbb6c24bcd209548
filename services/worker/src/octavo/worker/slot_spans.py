"""Makes a span of what the worker does for each traced sequence: from the opening of its slot to its last step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from octavo.common.messages.step import StepPlan, StepRefused, StepResult
from octavo.common.tracing import Span, Tracer


@dataclass(slots=True)
class _Slot:
    span: Span
    sequence_id: int
    last_s: float
    num_steps: int = 0
    num_tokens: int = 0
    compute_us: int = 0


class SlotSpans:
    """Owns the spans of open slots. Told of plans and results in their order; does nothing while no slot is traced."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._slots: dict[int, _Slot] = {}
        self._rows: dict[int, list[tuple[_Slot, int]]] = {}
        """Traced rows of steps on their way, with their lengths, by step."""

    def on_plan(self, plan: StepPlan) -> None:
        """A plan is to be run."""
        for slot in plan.closed_slots:
            self._end(slot)
        for opened in plan.opened_slots:
            if opened.traceparent:
                span = self._tracer.start("worker", opened.traceparent)
                self._slots[opened.slot] = _Slot(span, opened.sequence_id, time.time())
        if self._slots:
            rows = zip(plan.slots, plan.lengths, strict=True)
            traced = [(self._slots[slot], length) for slot, length in rows if slot in self._slots]
            if traced:
                self._rows[plan.step_id] = traced

    def on_reply(self, reply: StepResult | StepRefused) -> None:
        """A plan has been run."""
        rows = self._rows.pop(reply.step_id, None)
        if rows is None or isinstance(reply, StepRefused):
            return
        now_s = time.time()
        for slot, length in rows:
            slot.last_s = now_s
            slot.num_steps += 1
            slot.num_tokens += length
            slot.compute_us += reply.compute_us

    def drop_all(self) -> None:
        """The scheduler starts over: no slot is open."""
        self._rows.clear()
        for slot in list(self._slots):
            self._end(slot)

    def close(self) -> None:
        """Send what is left."""
        self.drop_all()
        self._tracer.close()

    def _end(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is None:
            return
        facts = {
            "octavo.sequence_id": slot.sequence_id,
            "octavo.steps": slot.num_steps,
            "octavo.computed_tokens": slot.num_tokens,
            "octavo.step_seconds": slot.compute_us / 1e6,
        }
        slot.span.end(facts, at_s=slot.last_s)
