"""Makes the spans of a request of what its record says once it has ended: nothing is measured twice."""

from __future__ import annotations

import time
from dataclasses import replace

from octavo.common.messages.generation import Submit
from octavo.common.tracing import Span, Tracer
from octavo.scheduler.request_records import RequestRecord


class RequestSpans:
    """Owns the spans of live requests."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[str, Span] = {}
        """By `traceparent`."""

    def begin(self, submit: Submit) -> Submit:
        """A request has come. The same with the context for what is done for it from here on."""
        if not submit.traceparent:
            return submit
        span = self._tracer.start("scheduler", submit.traceparent)
        if not span.traceparent:
            return replace(submit, traceparent="")
        self._open[span.traceparent] = span
        return replace(submit, traceparent=span.traceparent)

    def end(self, record: RequestRecord, now: float) -> None:
        """It has ended. `now` is of the clock of the record."""
        span = self._open.pop(record.traceparent, None)
        if span is None:
            return
        offset_s = time.time() - now
        ended_at = now if record.ended_at is None else record.ended_at
        first = record.sequences[0] if record.sequences else None
        admission = first.admissions[0] if first is not None and first.admissions else None
        admitted_at = ended_at if admission is None else admission.at
        first_token_at = ended_at if record.first_token_at is None else record.first_token_at
        waits = {f"octavo.wait.{cause}": seconds for cause, seconds in (first.wait_s if first else {}).items()}
        span.part("queue", record.arrived_at + offset_s, admitted_at + offset_s, waits)
        if admission is not None:
            hits = admission.num_device_hits + admission.num_host_hits
            blocks = {"octavo.blocks": admission.num_blocks, "octavo.blocks_found": hits}
            span.part("prefill", admitted_at + offset_s, first_token_at + offset_s, blocks)
        if record.first_token_at is not None:
            lost = {"octavo.preemptions": sum(own.num_preemptions for own in record.sequences)}
            span.part("decode", first_token_at + offset_s, ended_at + offset_s, lost)
        facts: dict[str, str | int] = {
            "octavo.request_id": record.request_id,
            "octavo.prompt_tokens": record.num_prompt_tokens,
            "octavo.choices": record.num_choices,
        }
        span.end(facts, error=record.error[0] if record.error else "", at_s=ended_at + offset_s)

    def close(self) -> None:
        """Send what is left."""
        self._tracer.close()
