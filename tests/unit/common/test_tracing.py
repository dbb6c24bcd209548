"""Traces: what is kept of them, what travels, and what it costs to have none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.common.errors import NotReadyError
from octavo.common.messages.generation import FinishReason, SamplingParams, Submit
from octavo.common.messages.kv import Admitted, Verdict
from octavo.common.messages.step import OpenSlot, StepPlan, StepResult
from octavo.common.service_config import ServiceConfig
from octavo.common.tracing import Tracer, open_tracer
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.request_spans import RequestSpans
from octavo.scheduler.sequence import Request, Sequence
from octavo.scheduler.timeline import Timeline
from octavo.worker.slot_spans import SlotSpans

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_trace_goes_on_from_the_callers_and_honours_its_decision() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("x", exporter)
    kept, dropped = tracer.start("a", PARENT), tracer.start("b", PARENT[:-1] + "0")
    assert kept.traceparent.startswith(PARENT[:36])
    assert kept.traceparent != PARENT
    assert dropped.traceparent == ""
    kept.part("p", 1.0, 2.5, {"n": 1})
    kept.end({}, error="broke", name="c", at_s=9.0)
    dropped.end({})
    tracer.close()
    part, whole = exporter.get_finished_spans()
    assert (part.start_time, part.end_time) == (1_000_000_000, 2_500_000_000)
    assert part.parent is not None
    assert whole.context is not None
    assert part.parent.span_id == whole.context.span_id
    assert (whole.name, whole.status.description, whole.end_time) == ("c", "broke", 9_000_000_000)


@pytest.mark.parametrize("given", ["", "nonsense", PARENT + "-x", PARENT.replace("4bf9", "zzzz"), "00-" + "0" * 32])
def test_a_malformed_context_begins_a_trace(given: str) -> None:
    tracer = Tracer("x", InMemorySpanExporter())
    span = tracer.start("a", given)
    assert len(span.traceparent) == 55
    assert span.traceparent[:36] != PARENT[:36]
    span.end({})
    assert Tracer("x", InMemorySpanExporter(), sample_ratio=0.0).start("a", given).traceparent == ""
    tracer.close()


def test_without_a_collector_nothing_that_sends_is_imported() -> None:
    assert open_tracer("x", ServiceConfig()) is None
    program = "import sys, octavo.gateway.main, octavo.scheduler.main; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "octavo.gateway.app" in modules
    assert not [module for module in modules if module.startswith("opentelemetry.exporter")]


def test_the_parts_of_a_request_are_told_by_its_record() -> None:
    exporter = InMemorySpanExporter()
    spans, log = RequestSpans(Tracer("scheduler", exporter)), RequestLog(10, Timeline())
    log.on_ended = spans.end
    submit = spans.begin(Submit(1, "r", (1, 2, 3), SamplingParams(4), traceparent=PARENT))
    assert submit.traceparent[:36] == PARENT[:36]
    request = Request(1, 1, "r", submit.params, 3, b"", traceparent=submit.traceparent)
    sequence = Sequence(1, request, 0, [1, 2, 3])
    log.arrived(sequence)
    log.settle(100.0)
    log.admitted(sequence, Admitted(1, Verdict.OK), 16)
    log.settle(101.0)
    log.token_came(sequence)
    log.settle(103.0)
    log.choice_ended(sequence, FinishReason.LENGTH, goes_on=False)
    log.ended(request)
    log.settle(106.0)
    refused = spans.begin(Submit(2, "s", (1,), SamplingParams(4), traceparent=PARENT))
    log.refused(refused, NotReadyError("no"))
    log.settle(107.0)
    untraced = Submit(3, "t", (1,), SamplingParams(4))
    assert spans.begin(untraced) is untraced
    spans.close()
    finished = exporter.get_finished_spans()
    seconds = [(span.name, round(((span.end_time or 0) - (span.start_time or 0)) / 1e9, 3)) for span in finished]
    assert seconds[:3] == [("queue", 1.0), ("prefill", 2.0), ("decode", 3.0)]
    refusal = finished[-1]
    assert (refusal.name, refusal.status.description) == ("scheduler", "NOT_READY")
    assert [span.name for span in finished].count("scheduler") == 2


def test_a_slot_is_told_by_its_steps() -> None:
    exporter = InMemorySpanExporter()
    spans = SlotSpans(Tracer("worker", exporter))
    opened = [
        OpenSlot(slot, slot + 10, (1,), 0.0, 1.0, 0, None, traceparent=PARENT if slot == 0 else "") for slot in (0, 1)
    ]
    spans.on_plan(StepPlan(1, opened_slots=opened, slots=[0, 1], starts=[0, 0], lengths=[5, 3]))
    spans.on_reply(StepResult(1, [7, 8], [None, None], compute_us=1000, idle_us=0))
    spans.on_plan(StepPlan(2, slots=[0, 1], starts=[5, 3], lengths=[1, 1]))
    spans.on_reply(StepResult(2, [7, 8], [None, None], compute_us=500, idle_us=0))
    spans.on_plan(StepPlan(3, closed_slots=[0], slots=[1], starts=[4], lengths=[1]))
    spans.on_reply(StepResult(3, [8], [None], compute_us=500, idle_us=0))
    spans.close()
    [span] = exporter.get_finished_spans()
    assert span.attributes == {
        "octavo.sequence_id": 10,
        "octavo.steps": 2,
        "octavo.computed_tokens": 6,
        "octavo.step_seconds": 0.0015,
    }
