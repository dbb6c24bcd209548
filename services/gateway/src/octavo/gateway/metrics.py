"""The gateway's metrics. One set per process, in the default registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_LATENCIES_S = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

HTTP_REQUESTS = Counter("octavo_http_requests", "Answered HTTP requests.", ["route", "status"])
OPEN_GENERATIONS = Gauge("octavo_open_generations", "Client requests that are being generated.")
CLIENT_DISCONNECTS = Counter("octavo_client_disconnects", "Clients that left before the end of their answer.")
PROMPT_TOKENS = Counter("octavo_prompt_tokens", "Prompt tokens of answered requests.")
OUTPUT_TOKENS = Counter("octavo_output_tokens", "Tokens sent to clients.")
TENANT_REQUESTS = Counter("octavo_tenant_requests", "Requests by tenant, served or refused.", ["tenant", "outcome"])
TENANT_TOKENS = Counter("octavo_tenant_tokens", "Tokens by tenant: of prompts, and sent.", ["tenant", "kind"])
RATE_LIMITED = Counter("octavo_rate_limited", "Requests refused by a tenant's limit.", ["limit"])
LIMITER_FALLBACKS = Counter(
    "octavo_limiter_fallbacks", "Calls of the shared limits that Redis did not answer; counted by the gateway alone."
)
TTFT_SECONDS = Histogram("octavo_ttft_seconds", "Request received to first token.", buckets=_LATENCIES_S)
INTER_TOKEN_LATENCY_SECONDS = Histogram(
    "octavo_inter_token_latency_seconds", "Time between two tokens of one choice.", buckets=_TOKEN_LATENCIES_S
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
