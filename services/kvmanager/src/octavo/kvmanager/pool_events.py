"""Owns the ordered record of what a pool stores and drops, for routing and dashboards to follow."""

from __future__ import annotations

import enum
from typing import NamedTuple

CAPACITY = 16_384
"""Events that can be replayed."""


class EventKind(enum.IntEnum):
    """What happened to a block's content."""

    STORED = 1  # it can be found by its digest
    EVICTED = 2  # it gave way to other content
    FLUSHED = 3  # it was dropped on demand
    RESTORED = 4  # it can be found again, since it was copied from a lower tier, which keeps it too


class Tier(enum.IntEnum):
    """In which memory."""

    DEVICE = 1
    HOST = 2


class PoolEvent(NamedTuple):
    """One change. It names content by digest only: neither tokens nor salt can be told from it."""

    kind: EventKind
    tier: Tier
    block_id: int
    digest: bytes
    parent: bytes
    """Digest of the block before it; empty for the first of a sequence, and for blocks that go."""


class PoolEvents:
    """A ring of the last events, numbered from 1 in each life of the pool.

    Nothing is recorded until somebody watches. After the last watcher has left it goes on for one ring more: until
    then a watcher that comes back can be given what it missed. Afterwards it needs a snapshot, as one does that has
    fallen behind by more than the ring holds. Recording never waits for a watcher.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.life = 0
        """Names this life of the pool to watchers; set by the server before anybody can watch."""
        self.last = 0
        """Number of the last event."""
        self.is_recording = False
        self._capacity = capacity
        self._ring: list[PoolEvent | None] = []
        self._first_known = 0
        """Events up to this number are gone for good."""
        self._num_watchers = 0
        self._left_at = 0

    def watch(self) -> None:
        """Somebody watches from now on, until `unwatch`."""
        self._num_watchers += 1
        if not self.is_recording:
            self.is_recording = True
            self._ring = [None] * self._capacity
            self.last += 1  # stands for all that was not recorded
            self._first_known = self.last

    def unwatch(self) -> None:
        self._num_watchers -= 1
        self._left_at = self.last

    def record(self, event: PoolEvent) -> None:
        """To be called only while `is_recording`."""
        self.last += 1
        self._ring[self.last % self._capacity] = event
        if not self._num_watchers and self.last - self._left_at >= self._capacity:
            self.is_recording = False
            self._ring = []

    def can_replay_after(self, number: int) -> bool:
        return max(self._first_known, self.last - self._capacity) <= number <= self.last and self.is_recording

    def after(self, number: int, at_most: int) -> list[PoolEvent] | None:
        """The events that follow number `number`, oldest first; None if the next one is gone."""
        if not self.can_replay_after(number):
            return None
        ring, capacity = self._ring, self._capacity
        events = [ring[at % capacity] for at in range(number + 1, min(self.last, number + at_most) + 1)]
        return [event for event in events if event is not None]
