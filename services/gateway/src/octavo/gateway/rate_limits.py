"""Limits of tenants: buckets of requests and tokens that refill evenly, and requests that are open at once.

A bucket holds a minute's worth and is full at first. A request takes one from the first when it comes and its prompt's
tokens from the second before it is sent on; its output tokens are taken when they are known, so the second may fall
below zero, and then nothing more is let in until it has refilled.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from octavo.gateway.api_keys import Tenant

LimitKind = Literal["requests", "tokens", "concurrent_requests"]
_MINUTE_S = 60.0
_CONCURRENCY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a tenant has left after a call, and whether the call was refused: then nothing was taken."""

    requests: float
    tokens: float
    refused_by: LimitKind | None = None
    retry_after_s: float = 0.0
    """inf: never."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One open request of a tenant."""

    name: str
    tenant: Tenant
    lease_id: str = field(default_factory=lambda: secrets.token_hex(8))


class Limiter(Protocol):
    """Counts what tenants use."""

    async def enter(self, lease: Lease) -> Standing:
        """A request comes."""

    async def charge(self, lease: Lease, num_tokens: int) -> Standing:
        """Its prompt is known."""

    async def leave(self, lease: Lease, num_tokens: int) -> None:
        """It has ended, with so many output tokens."""

    async def run(self) -> None:
        """What it has to do meanwhile, until cancelled."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Usage:
    requests: float
    tokens: float
    at: float
    open_leases: set[str] = field(default_factory=set)


class MemoryLimiter:
    """Owns what the tenants of one process have used. The same rules as those of the script for Redis."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._usage: dict[str, _Usage] = {}

    async def run(self) -> None:
        """Nothing."""

    async def close(self) -> None: ...

    async def enter(self, lease: Lease) -> Standing:
        usage, tenant = self._refilled(lease), lease.tenant
        if tenant.max_concurrent and len(usage.open_leases) >= tenant.max_concurrent:
            return Standing(usage.requests, usage.tokens, "concurrent_requests", _CONCURRENCY_RETRY_S)
        for kind, level, limit in (
            ("requests", usage.requests, tenant.requests_per_minute),
            ("tokens", usage.tokens, tenant.tokens_per_minute),
        ):
            if limit and level < 1:
                return _refused(usage, "requests" if kind == "requests" else "tokens", 1 - level, limit)
        if tenant.requests_per_minute:
            usage.requests -= 1
        usage.open_leases.add(lease.lease_id)
        return Standing(usage.requests, usage.tokens)

    async def charge(self, lease: Lease, num_tokens: int) -> Standing:
        usage, limit = self._refilled(lease), lease.tenant.tokens_per_minute
        if limit and num_tokens > usage.tokens:
            return _refused(usage, "tokens", math.inf if num_tokens > limit else num_tokens - usage.tokens, limit)
        if limit:
            usage.tokens -= num_tokens
        return Standing(usage.requests, usage.tokens)

    async def leave(self, lease: Lease, num_tokens: int) -> None:
        usage = self._refilled(lease)
        if lease.tenant.tokens_per_minute:
            usage.tokens -= num_tokens
        usage.open_leases.discard(lease.lease_id)

    def _refilled(self, lease: Lease) -> _Usage:
        now = self._now_s()
        requests, tokens = lease.tenant.requests_per_minute or 0, lease.tenant.tokens_per_minute or 0
        usage = self._usage.get(lease.name)
        if usage is None:
            usage = self._usage[lease.name] = _Usage(requests, tokens, now)
        elapsed_s = max(0.0, now - usage.at)
        usage.requests = min(requests, usage.requests + elapsed_s * requests / _MINUTE_S)
        usage.tokens = min(tokens, usage.tokens + elapsed_s * tokens / _MINUTE_S)
        usage.at = now
        return usage


def _refused(usage: _Usage, kind: LimitKind, missing: float, limit: int) -> Standing:
    return Standing(usage.requests, usage.tokens, kind, missing * _MINUTE_S / limit)


def limit_headers(tenant: Tenant, standing: Standing) -> dict[str, str]:
    """As OpenAI's API tells them. `reset` is when the bucket would be full again."""
    headers: dict[str, str] = {}
    for name, limit, level in (
        ("requests", tenant.requests_per_minute, standing.requests),
        ("tokens", tenant.tokens_per_minute, standing.tokens),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(level)))
            headers[f"x-ratelimit-reset-{name}"] = duration_text((limit - level) * _MINUTE_S / limit)
    return headers


def duration_text(seconds: float) -> str:
    """A time as OpenAI's headers write it: 12ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(max(0.0, seconds) * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + text
