"""The gateway's metrics: one set per process, or one of all gateway processes that share `PROMETHEUS_MULTIPROC_DIR`."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
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


class SharedEventHistogram(Histogram):
    """The same where several processes count together, in files."""

    def observe(self, amount: float, count: int = 1) -> None:  # type: ignore[override]
        """Count `count` events of this value."""
        for _ in range(count):
            super().observe(amount)


_SHARED_DIR = os.environ.get("PROMETHEUS_MULTIPROC_DIR")

HTTP_REQUESTS = Counter("octavo_http_requests", "Answered HTTP requests.", ["route", "status"])
OPEN_GENERATIONS = Gauge(
    "octavo_open_generations", "Client requests that are being generated.", multiprocess_mode="livesum"
)
CLIENT_DISCONNECTS = Counter("octavo_client_disconnects", "Clients that left before the end of their answer.")
RESUBMITTED_REQUESTS = Counter(
    "octavo_resubmitted_requests", "Prompts that were submitted to another scheduler after theirs was lost."
)
ROUTED_REQUESTS = Counter("octavo_routed_requests", "Requests by the pool that they were sent to.", ["pool"])
FORESEEN_CACHED_TOKENS = Counter(
    "octavo_foreseen_cached_tokens", "Prompt tokens that the chosen pool was believed to hold, among several.", ["pool"]
)
MOVED_REQUESTS = Counter("octavo_moved_requests", "Requests that another group went on with, by reason.", ["reason"])
PROMPT_TOKENS = Counter("octavo_prompt_tokens", "Prompt tokens of answered requests.")
OUTPUT_TOKENS = Counter("octavo_output_tokens", "Tokens sent to clients.")
TENANT_REQUESTS = Counter("octavo_tenant_requests", "Requests by tenant, served or refused.", ["tenant", "outcome"])
TENANT_TOKENS = Counter("octavo_tenant_tokens", "Tokens by tenant: of prompts, and sent.", ["tenant", "kind"])
RATE_LIMITED = Counter("octavo_rate_limited", "Requests refused by a tenant's limit.", ["limit"])
LIMITER_FALLBACKS = Counter(
    "octavo_limiter_fallbacks", "Calls of the shared limits that Redis did not answer; counted by the gateway alone."
)
TTFT_SECONDS = Histogram(
    "octavo_ttft_seconds",
    "Request received to the first output: sent, if it is streamed, else sampled.",
    buckets=_LATENCIES_S,
)
INTER_TOKEN_LATENCY_SECONDS = (SharedEventHistogram if _SHARED_DIR else EventHistogram)(
    "octavo_inter_token_latency_seconds", "Time between two tokens of one choice.", buckets=_TOKEN_LATENCIES_S
)
QUEUE_SECONDS = Histogram("octavo_queue_seconds", "Prompt sent on to its blocks.", buckets=_LATENCIES_S)
PREFILL_SECONDS = Histogram("octavo_prefill_seconds", "Prompt's blocks to first token.", buckets=_LATENCIES_S)
DECODE_SECONDS = Histogram("octavo_decode_seconds", "First token to last, of a choice.", buckets=_LATENCIES_S)
TPOT_SECONDS = Histogram(
    "octavo_time_per_output_token_seconds",
    "Mean time between the tokens of a choice.",
    buckets=_TOKEN_LATENCIES_S,
)
PROMPT_LENGTH = Histogram("octavo_request_prompt_tokens", "Tokens of a prompt.", buckets=_LENGTHS)
OUTPUT_LENGTH = Histogram("octavo_request_output_tokens", "Output tokens of a choice.", buckets=_LENGTHS)
FINISHED_CHOICES = Counter(
    "octavo_finished_choices", "Choices that ended: stop, length, abort (the client left) or error.", ["reason"]
)
REQUEST_SECONDS = Histogram("octavo_request_seconds", "Request received to end of the answer.", buckets=_LATENCIES_S)


def exposition() -> bytes:
    """All of them, as Prometheus reads it."""
    if not _SHARED_DIR:
        return generate_latest()
    registry = CollectorRegistry()
    MultiProcessCollector(registry, _SHARED_DIR)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def forget_dead_processes() -> None:
    """What counts the present of gateways that died no longer counts; what they counted up stays."""
    for file in Path(_SHARED_DIR).glob("gauge_live*_*.db") if _SHARED_DIR else ():
        pid = int(file.stem.rpartition("_")[2])
        with suppress(FileNotFoundError):  # another gateway does the same
            if not Path(f"/proc/{pid}").exists():
                mark_process_dead(pid, _SHARED_DIR)  # type: ignore[no-untyped-call]


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
