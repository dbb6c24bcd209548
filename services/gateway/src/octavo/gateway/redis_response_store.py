"""Keeps responses in Redis, so that any gateway can give them out. Redis drops what has expired."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio
from redis.exceptions import RedisError

from octavo.common.errors import NotReadyError

_KEY_PREFIX = "octavo:response:"
_TIMEOUT_S = 2.0


class RedisResponseStore:
    """Owns the connections. Records above `max_bytes` are not kept; how much there is of all is Redis's `maxmemory`."""

    def __init__(self, url: str, max_bytes: int, ttl_s: float) -> None:
        self._redis = redis.asyncio.Redis.from_url(url, socket_timeout=None, health_check_interval=30)
        self._max_bytes, self._ttl_ms = max_bytes, math.ceil(ttl_s * 1000)

    async def put(self, key: str, record: bytes) -> None:
        async with _reachable():
            if len(record) <= self._max_bytes:
                await self._redis.set(_KEY_PREFIX + key, record, px=self._ttl_ms)

    async def get(self, key: str) -> bytes | None:
        async with _reachable():
            record = await self._redis.get(_KEY_PREFIX + key)
        assert not isinstance(record, str)  # it would be, if the client decoded answers
        return record

    async def delete(self, key: str) -> bool:
        async with _reachable():
            return bool(await self._redis.delete(_KEY_PREFIX + key))

    async def close(self) -> None:
        await self._redis.aclose()


@asynccontextmanager
async def _reachable() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            yield
    except (RedisError, OSError) as error:
        raise NotReadyError(f"the store of responses cannot be reached: {type(error).__name__}") from error
