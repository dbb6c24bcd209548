"""Traces of requests over all services, by OpenTelemetry. Off unless a collector is named; then nothing is imported.

A request's context goes from service to service as a W3C `traceparent`, empty for a request that is not traced.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from octavo.common.service_config import ServiceConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer as OtelTracer

log = structlog.get_logger()

Attributes = Mapping[str, str | bool | int | float]
_EXPORT_TIMEOUT_S = 5
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")


class TracingUnavailableError(Exception):
    """A collector is named, and OpenTelemetry is not installed."""


class Span:
    """Something that a service does for a request, from its start to `end`."""

    def __init__(self, tracer: OtelTracer, span: OtelSpan) -> None:
        self._tracer, self._span = tracer, span
        context = span.get_span_context()
        self.traceparent = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-01" if context.trace_flags.sampled else ""
        )
        """The context for what another service does for it; empty if the trace is not kept."""

    def part(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """A part of it that is over. Times are seconds since 1970."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name, set_span_in_context(self._span), attributes=attributes, start_time=_nanoseconds(start_s)
        )
        span.end(_nanoseconds(end_s))

    def end(self, attributes: Attributes, error: str = "", name: str = "", at_s: float | None = None) -> None:
        """It is over; `name` takes the place of the one that it began with."""
        from opentelemetry.trace import Status, StatusCode

        if name:
            self._span.update_name(name)
        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_nanoseconds(time.time() if at_s is None else at_s))


class Tracer:
    """Sends the spans of one service, in batches, from a thread of its own. What it cannot send in time is dropped."""

    def __init__(self, service: str, exporter: SpanExporter, sample_ratio: float = 1.0) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create({"service.name": f"octavo-{service}"}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = self._provider.get_tracer("octavo")

    def start(self, name: str, parent: str = "", *, is_server: bool = False, at_s: float | None = None) -> Span:
        """A span that begins now, or began at a time; `parent` is the `traceparent` that came with the request, if any.

        One that is malformed counts as none.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = Context()
        if _TRACEPARENT.match(parent):
            context = TraceContextTextMapPropagator().extract({"traceparent": parent}, context)
        kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
        start_ns = _nanoseconds(time.time() if at_s is None else at_s)
        return Span(self._tracer, self._tracer.start_span(name, context, kind, start_time=start_ns))

    def close(self) -> None:
        """Send what is left, and end. Takes as long as the collector, some seconds at most."""
        self._provider.shutdown()


def open_tracer(service: str, config: ServiceConfig) -> Tracer | None:
    """The tracer that the settings ask for; None where they name no collector. Raises TracingUnavailableError."""
    if config.otlp_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingUnavailableError(
            f"otlp_endpoint is set, but {error.name} is not installed: pip install 'octavo-common[tracing]'"
        ) from None
    endpoint = f"{config.otlp_endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    log.info("traces are sent", endpoint=endpoint, sample_ratio=config.trace_sample_ratio)
    return Tracer(service, exporter, config.trace_sample_ratio)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
