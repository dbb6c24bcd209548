"""Limits that several gateways share, in Redis. Where Redis cannot be reached, each gateway goes by its own count."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Literal, cast

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from octavo.gateway import metrics
from octavo.gateway.rate_limits import Lease, LimitKind, MemoryLimiter, Standing

log = structlog.get_logger()

CALL_TIMEOUT_S = 0.25
"""A request never waits longer for Redis."""
_PAUSE_S = 1.0
"""After a failure Redis is not asked for so long."""
_LEASE_S = 60
"""An open request counts for so long after its gateway has last said that it is open."""

_SCRIPT = """
local op, rpm, tpm, cap, num = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local lease, lease_s = ARGV[6], tonumber(ARGV[7])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
if op == 'renew' then
  redis.call('ZADD', KEYS[2], 'XX', now + lease_s, lease)
  redis.call('EXPIRE', KEYS[2], lease_s)
  return {'', '0', '0', '0'}
end
local state = redis.call('HMGET', KEYS[1], 'requests', 'tokens', 'at')
local elapsed = math.max(0, now - (tonumber(state[3] or now)))
local function refilled(level, limit)
  return math.min(limit, tonumber(level or limit) + elapsed * limit / 60)
end
local requests, tokens = refilled(state[1], rpm), refilled(state[2], tpm)
local refusal, retry = '', 0
if op == 'enter' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if cap > 0 and redis.call('ZCARD', KEYS[2]) >= cap then
    refusal, retry = 'concurrent_requests', 1
  elseif rpm > 0 and requests < 1 then
    refusal, retry = 'requests', (1 - requests) * 60 / rpm
  elseif tpm > 0 and tokens < 1 then
    refusal, retry = 'tokens', (1 - tokens) * 60 / tpm
  else
    requests = rpm > 0 and requests - 1 or 0
    redis.call('ZADD', KEYS[2], now + lease_s, lease)
    redis.call('EXPIRE', KEYS[2], lease_s)
  end
elseif op == 'charge' then
  if tpm > 0 and num > tokens then
    refusal = 'tokens'
    retry = num > tpm and math.huge or (num - tokens) * 60 / tpm
  else
    tokens = tpm > 0 and tokens - num or 0
  end
else
  tokens = tpm > 0 and tokens - num or 0
  redis.call('ZREM', KEYS[2], lease)
end
redis.call('HSET', KEYS[1], 'requests', string.format('%.6f', requests), 'tokens', string.format('%.6f', tokens),
  'at', string.format('%.6f', now))
local full_in = math.max(rpm > 0 and (rpm - requests) * 60 / rpm or 0, tpm > 0 and (tpm - tokens) * 60 / tpm or 0)
redis.call('EXPIRE', KEYS[1], math.ceil(full_in) + 1)
return {refusal, string.format('%.6f', requests), string.format('%.6f', tokens), string.format('%.6f', retry)}
"""

_Operation = Literal["enter", "charge", "leave", "renew"]


class RedisLimiter:
    """Owns the connections, and what this gateway counts by itself meanwhile."""

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(url, socket_timeout=None, decode_responses=True)
        self._script = self._redis.register_script(_SCRIPT)
        self._local = MemoryLimiter()
        self._shared_leases: dict[str, Lease] = {}
        """Those that Redis counts, by id."""
        self._doubtful: set[str] = set()
        """Those that Redis may count although it has not said so in time."""
        self._ask_again_at = 0.0

    async def run(self) -> None:
        """Say of open requests that they are open, until cancelled."""
        while True:
            await asyncio.sleep(_LEASE_S / 3)
            for lease in list(self._shared_leases.values()):
                await self._ask("renew", lease)

    async def close(self) -> None:
        await self._redis.aclose()

    async def enter(self, lease: Lease) -> Standing:
        standing = await self._ask("enter", lease)
        if standing is None:
            self._doubtful.add(lease.lease_id)
            return await self._local.enter(lease)
        if standing.refused_by is None:
            self._shared_leases[lease.lease_id] = lease
        return standing

    async def charge(self, lease: Lease, num_tokens: int) -> Standing:
        standing = await self._ask("charge", lease, num_tokens) if lease.lease_id in self._shared_leases else None
        return standing or await self._local.charge(lease, num_tokens)

    async def leave(self, lease: Lease, num_tokens: int) -> None:
        if self._shared_leases.pop(lease.lease_id, None) is None or not await self._ask("leave", lease, num_tokens):
            await self._local.leave(lease, num_tokens)
        if lease.lease_id in self._doubtful:
            self._doubtful.discard(lease.lease_id)
            await self._ask("leave", lease)

    async def _ask(self, operation: _Operation, lease: Lease, num_tokens: int = 0) -> Standing | None:
        """None if Redis has not answered."""
        if time.monotonic() < self._ask_again_at:
            return None
        tenant, base = lease.tenant, f"octavo:limits:{{{lease.name}}}"
        limits = (tenant.requests_per_minute or 0, tenant.tokens_per_minute or 0, tenant.max_concurrent or 0)
        call = self._script(
            keys=[base, base + ":open"], args=[operation, *limits, num_tokens, lease.lease_id, _LEASE_S]
        )
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                answer = await cast("Awaitable[list[str]]", call)
        except (RedisError, OSError, TimeoutError) as error:
            metrics.LIMITER_FALLBACKS.inc()
            self._ask_again_at = time.monotonic() + _PAUSE_S
            log.warning("limits are counted by this gateway alone", error=type(error).__name__)
            return None
        refusal, requests, tokens, retry = answer
        return Standing(float(requests), float(tokens), cast("LimitKind", refusal) if refusal else None, float(retry))
