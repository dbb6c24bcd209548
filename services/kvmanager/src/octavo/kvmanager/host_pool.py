"""Owns the state of every block of host memory of one pool: swapped sequences, and prefix blocks that sank."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable

from octavo.common.block_hash import BlockKey, digest_of
from octavo.common.errors import InternalError
from octavo.kvmanager.pool_events import EventKind, PoolEvent, PoolEvents, Tier


class HostState(enum.IntEnum):
    """Where a host block is."""

    FREE = 0
    SWAPPED = 1
    CACHED = 2


class HostPool:
    """Hands out host blocks and takes them back. Every block is in exactly one state:

        free     nobody's
        swapped  holds a block of a swapped sequence, or a transfer that nobody waits for still uses it
        cached   holds an evicted prefix block, found by its key; handed out when none is free, least recently
                 used first

    A block that a transfer reads or writes is not handed out before the transfer has ended, whoever gave it up.
    """

    def __init__(self, num_blocks: int, events: PoolEvents) -> None:
        """What is stored and dropped is recorded in `events`."""
        self.num_blocks = num_blocks
        self._events = events
        self.states = [HostState.FREE] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.keys: list[BlockKey | None] = [None] * num_blocks
        self.parents: list[BlockKey | None] = [None] * num_blocks
        """Key of the block before it in its prefix. Means something only where there is a key."""
        self.key_to_block: dict[BlockKey, int] = {}
        self.evictable: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that no transfer reads, least recently used first."""
        self.num_transfers = [0] * num_blocks
        """Unfinished transfers that read or write each block."""
        self.given_up: set[int] = set()
        """Swapped blocks that become free with the end of their last transfer."""

    @property
    def num_cached(self) -> int:
        return len(self.key_to_block)

    @property
    def num_swapped(self) -> int:
        return self.num_blocks - len(self.free) - self.num_cached

    def find(self, key: BlockKey) -> int | None:
        """The host block that holds this content, or None. It becomes the most recently used."""
        host_id = self.key_to_block.get(key)
        if host_id is None:
            return None
        if host_id in self.evictable:
            self.evictable.move_to_end(host_id)
        return host_id

    def take(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks as swapped ones, or none at all if fewer are free or evictable."""
        if num_blocks > len(self.free) + len(self.evictable):
            return None
        taken = [self.free.pop() for _ in range(min(num_blocks, len(self.free)))]
        for _ in range(num_blocks - len(taken)):
            host_id, _ = self.evictable.popitem(last=False)
            self._forget_key(host_id, EventKind.EVICTED)
            taken.append(host_id)
        for host_id in taken:
            self.states[host_id] = HostState.SWAPPED
        return taken

    def give_back(self, host_ids: Iterable[int]) -> None:
        """Swapped blocks become free, at once or when their transfers have ended."""
        for host_id in host_ids:
            if self.states[host_id] is not HostState.SWAPPED or host_id in self.given_up:
                raise InternalError(f"host block {host_id} is given back, but nobody held it")
            if self.num_transfers[host_id]:
                self.given_up.add(host_id)
            else:
                self._set_free(host_id)

    def keep_cached(self, host_id: int, key: BlockKey, parent: BlockKey | None) -> None:
        """A swapped block becomes a cached one; free instead if its content is found elsewhere already.

        `parent`: key of the block before it, None for the first of a sequence.
        """
        if key in self.key_to_block:
            self.give_back([host_id])
            return
        self.states[host_id] = HostState.CACHED
        self.keys[host_id], self.parents[host_id] = key, parent
        self.key_to_block[key] = host_id
        self._record(EventKind.STORED, host_id, key, parent)
        if not self.num_transfers[host_id]:
            self.evictable[host_id] = None

    def begin_transfer(self, host_ids: Iterable[int]) -> None:
        for host_id in host_ids:
            self.num_transfers[host_id] += 1
            self.evictable.pop(host_id, None)

    def end_transfer(self, host_ids: Iterable[int]) -> None:
        for host_id in host_ids:
            self.num_transfers[host_id] -= 1
            if self.num_transfers[host_id]:
                continue
            if host_id in self.given_up:
                self.given_up.remove(host_id)
                self._set_free(host_id)
            elif self.states[host_id] is HostState.CACHED:
                self.evictable[host_id] = None

    def forget_cached(self, matches: Callable[[BlockKey], bool]) -> None:
        """Cached blocks whose key matches are found no more."""
        for host_id, key in enumerate(self.keys):
            if key is None or not matches(key):
                continue
            self._forget_key(host_id, EventKind.FLUSHED)
            self.evictable.pop(host_id, None)
            self.states[host_id] = HostState.SWAPPED
            self.give_back([host_id])

    def _forget_key(self, host_id: int, kind: EventKind) -> None:
        key = self.keys[host_id]
        assert key is not None
        del self.key_to_block[key]
        self.keys[host_id] = None
        self._record(kind, host_id, key, None)

    def _record(self, kind: EventKind, host_id: int, key: BlockKey, parent: BlockKey | None) -> None:
        if self._events.is_recording:
            parent_digest = b"" if parent is None else digest_of(parent)
            self._events.record(PoolEvent(kind, Tier.HOST, host_id, digest_of(key), parent_digest))

    def _set_free(self, host_id: int) -> None:
        self.states[host_id] = HostState.FREE
        self.free.append(host_id)
