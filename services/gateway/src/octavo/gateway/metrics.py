"""The gateway's metrics. One set per process, in the default registry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_LATENCIES_S = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class EventHistogram:
    """A histogram for what happens with every token: several equal values cost one lookup, and no lock.

    Observe on one thread only.
    """

    def __init__(
        self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._name, self._documentation, self._bounds = name, documentation, tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` events of this value."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def describe(self) -> list[HistogramMetricFamily]:
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets, self._sum)


HTTP_REQUESTS = Counter("octavo_http_requests", "Answered HTTP requests.", ["route", "status"])
OPEN_GENERATIONS = Gauge("octavo_open_generations", "Client requests that are being generated.")
CLIENT_DISCONNECTS = Counter("octavo_client_disconnects", "Clients that left before the end of their answer.")
RESUBMITTED_REQUESTS = Counter(
    "octavo_resubmitted_requests", "Prompts that were submitted to another scheduler after theirs was lost."
)
PROMPT_TOKENS = Counter("octavo_prompt_tokens", "Prompt tokens of answered requests.")
OUTPUT_TOKENS = Counter("octavo_output_tokens", "Tokens sent to clients.")
TENANT_REQUESTS = Counter("octavo_tenant_requests", "Requests by tenant, served or refused.", ["tenant", "outcome"])
TENANT_TOKENS = Counter("octavo_tenant_tokens", "Tokens by tenant: of prompts, and sent.", ["tenant", "kind"])
RATE_LIMITED = Counter("octavo_rate_limited", "Requests refused by a tenant's limit.", ["limit"])
LIMITER_FALLBACKS = Counter(
    "octavo_limiter_fallbacks", "Calls of the shared limits that Redis did not answer; counted by the gateway alone."
)
TTFT_SECONDS = Histogram("octavo_ttft_seconds", "Request received to first token.", buckets=_LATENCIES_S)
INTER_TOKEN_LATENCY_SECONDS = EventHistogram(
    "octavo_inter_token_latency_seconds", "Time between two tokens of one choice.", _TOKEN_LATENCIES_S
)
REQUEST_SECONDS = Histogram("octavo_request_seconds", "Request received to end of the answer.", buckets=_LATENCIES_S)


def merged(own: bytes, other: bytes) -> bytes:
    """`own`, and those `octavo_` families of another process's exposition that `own` does not have."""
    own_families = {line.split(b" ", 3)[2] for line in own.splitlines() if line.startswith(b"# TYPE ")}
    kept, is_kept = [], False
    for line in other.splitlines():
        if line.startswith((b"# HELP ", b"# TYPE ")):
            family = line.split(b" ", 3)[2]
            is_kept = family.startswith(b"octavo_") and family not in own_families
        if is_kept and line:
            kept.append(line + b"\n")
    return own + b"".join(kept)
