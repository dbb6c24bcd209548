"""The registry in Redis: what is there expires, so that what died is gone without anybody's doing.

octavo:members                 sorted set: member |-> when it expires, in ms of Redis's clock
octavo:member:ID               what the member told
octavo:lease:ROLE:POOL         who holds the lease; expires
octavo:fence:ROLE:POOL         the highest epoch that was granted or told; stays
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from octavo.common.errors import ProtocolError
from octavo.common.registry.members import Member
from octavo.common.registry.registry import Grant, RegistryAwayError
from octavo.common.roles import Role

log = structlog.get_logger()

_MEMBERS = "octavo:members"
_MEMBER = "octavo:member:"

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

_REGISTER = (
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[2])
"""
)
"""KEYS: members, member. ARGV: id, ttl, what it tells."""

_LIST = (
    _NOW
    + """
redis.call('ZADD', KEYS[1], 'XX', 0, '')
local told = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf')) do
  local member = redis.call('GET', ARGV[1] .. id)
  if member then told[#told + 1] = member end
end
return told
"""
)
"""KEYS: members. ARGV: what the keys of members begin with. The ZADD changes nothing. It fails in a Redis that takes no
writes, being full or a replica: that one forgets all who cannot renew, and is as good as away."""

# Epochs are above 2 ** 40 and below 2 ** 63. Lua's numbers are doubles: exact up to 2 ** 53, which milliseconds since
# 1970 do not reach for 280,000 years.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return {'0', holder} end
local epoch = tonumber(redis.call('GET', KEYS[2]) or '0') + 1
if epoch < tonumber(ARGV[3]) then epoch = tonumber(ARGV[3]) end
local text = string.format('%.0f', epoch)
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {text, ARGV[1]}
"""
"""KEYS: lease, fence. ARGV: id, ttl, least epoch."""

_KEEP = """
local holder, fence = redis.call('GET', KEYS[1]), tonumber(redis.call('GET', KEYS[2]) or '0')
if holder and holder ~= ARGV[1] then return 0 end
if not holder and fence > tonumber(ARGV[3]) then return 0 end
if fence < tonumber(ARGV[3]) then redis.call('SET', KEYS[2], ARGV[3]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
"""KEYS: lease, fence. ARGV: id, ttl, highest epoch used. A lease that expired, or that a Redis without memory does not
know, is still the holder's unless somebody had it in between, which the fence tells."""

_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class RedisRegistry:
    """Owns the connections."""

    def __init__(self, url: str, timeout_s: float = 2.0) -> None:
        """`timeout_s`: for one call, connecting included."""
        self._timeout_s = timeout_s
        self._redis = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=None,  # `_in_time` ends calls: redis-py's way loses a cancellation now and then
            decode_responses=True,
            retry=Retry(NoBackoff(), 1),  # a connection that died since the last call; all calls may be repeated
        )

    async def members(self) -> list[Member]:
        told = await self._run(_LIST, [_MEMBERS], [_MEMBER])
        members = []
        for text in told:
            try:
                members.append(Member.from_json(text))
            except ProtocolError as error:
                log.warning("member not understood", error=error.message)
        return members

    async def register(self, member: Member, ttl_s: float) -> None:
        keys = [_MEMBERS, _MEMBER + member.member_id]
        await self._run(_REGISTER, keys, [member.member_id, _ms(ttl_s), member.to_json()])

    async def deregister(self, member: Member) -> None:
        await self._in_time(self._redis.zrem(_MEMBERS, member.member_id))
        await self._in_time(self._redis.delete(_MEMBER + member.member_id))

    async def take_lease(self, role: Role, pool_id: str, member_id: str, ttl_s: float, at_least: int) -> Grant:
        epoch, holder_id = await self._run(_TAKE, _lease_keys(role, pool_id), [member_id, _ms(ttl_s), at_least])
        return Grant(int(epoch), holder_id)

    async def keep_lease(self, role: Role, pool_id: str, member_id: str, ttl_s: float, epoch: int) -> bool:
        return bool(await self._run(_KEEP, _lease_keys(role, pool_id), [member_id, _ms(ttl_s), epoch]))

    async def release_lease(self, role: Role, pool_id: str, member_id: str) -> None:
        await self._run(_RELEASE, _lease_keys(role, pool_id)[:1], [member_id])

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: str, keys: list[str], arguments: list[Any]) -> Any:
        return await self._in_time(self._redis.eval(script, len(keys), *keys, *arguments))

    async def _in_time(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            raise RegistryAwayError(f"the registry does not answer: {type(error).__name__}") from error


def _lease_keys(role: Role, pool_id: str) -> list[str]:
    return [f"octavo:lease:{role}:{pool_id}", f"octavo:fence:{role}:{pool_id}"]


def _ms(seconds: float) -> int:
    return math.ceil(seconds * 1000)
