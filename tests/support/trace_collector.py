"""An OpenTelemetry collector that keeps what it gets."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class CollectedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


@dataclass
class TraceCollector:
    url: str
    spans: list[CollectedSpan] = field(default_factory=list)

    def named(self, name: str, trace_id: str) -> list[CollectedSpan]:
        return [span for span in self.spans if (span.name, span.trace_id) == (name, trace_id)]


@contextmanager
def collecting_traces() -> Iterator[TraceCollector]:
    """Takes OTLP over HTTP while open."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.spans += _spans(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = TraceCollector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, name="trace collector")
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterator[CollectedSpan]:
    for resource in request.resource_spans:
        names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield CollectedSpan(
                    names["service.name"],
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    {a.key: getattr(a.value, a.value.WhichOneof("value") or "string_value") for a in span.attributes},
                )
