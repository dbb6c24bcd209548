"""Keeps responses for retrieval and for those that go on from them: in this process, up to a size and for a time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol


class ResponseStore(Protocol):
    """Records by key. Raises NotReadyError where it cannot be reached."""

    async def put(self, key: str, record: bytes) -> None:
        """Keep a record, in place of an earlier one of that key."""

    async def get(self, key: str) -> bytes | None:
        """The record; None if there is none, or no longer."""

    async def delete(self, key: str) -> bool:
        """Give the record up. False if there was none."""

    async def close(self) -> None:
        """Give up what the store holds open."""


class MemoryResponseStore:
    """Owns the records. When they are too many bytes, the oldest go."""

    def __init__(self, max_bytes: int, ttl_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._ttl_s, self._now_s = max_bytes, ttl_s, now_s
        self._records: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        """Expiry and content, oldest first. All live equally long, so the first one expires first."""
        self.num_bytes = 0

    async def put(self, key: str, record: bytes) -> None:
        self._drop(key)
        if len(record) > self._max_bytes:
            return
        self._records[key] = (self._now_s() + self._ttl_s, record)
        self.num_bytes += len(record)
        self._drop_expired()
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._records)))

    async def get(self, key: str) -> bytes | None:
        self._drop_expired()
        entry = self._records.get(key)
        return entry[1] if entry is not None else None

    async def delete(self, key: str) -> bool:
        self._drop_expired()
        return self._drop(key)

    async def close(self) -> None:
        self._records.clear()
        self.num_bytes = 0

    def _drop_expired(self) -> None:
        now_s = self._now_s()
        while self._records:
            key, (expiry_s, _) = next(iter(self._records.items()))
            if expiry_s > now_s:
                return
            self._drop(key)

    def _drop(self, key: str) -> bool:
        entry = self._records.pop(key, None)
        self.num_bytes -= len(entry[1]) if entry is not None else 0
        return entry is not None
