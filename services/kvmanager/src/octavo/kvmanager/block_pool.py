"""Owns the state of every KV block of one pool: who may have it next."""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence, Set

from octavo.common.errors import InternalError, ProtocolError
from octavo.common.messages.kv import PoolCounts
from octavo.kvmanager.block_hash import BlockKey, digest_of
from octavo.kvmanager.catalogue import Catalogue
from octavo.kvmanager.pool_events import EventKind, PoolEvent, PoolEvents, Tier
from octavo.kvmanager.stats import KvStats


class BlockState(enum.IntEnum):
    """Where a block is."""

    FREE = 0
    GRANTED = 1
    ACTIVE = 2
    CACHED = 3
    QUARANTINED = 4


class BlockPool:
    """Hands out KV blocks and takes them back. Every block is in exactly one state:

        free         in no table, no key                   handed out first, most recently freed first
        granted      a credit of the scheduler, no key     becomes active when spent, free when returned
        active       ref_count >= 1                        never handed out
        cached       ref_count == 0, has a key             handed out last, least recently used first
        quarantined  ref_count == 0, fence not yet open    never handed out; found by its key if it has one

    Most recently freed first keeps the memory that is touched small: a worker's pool may be mapped lazily.

    A block's fence is the last step that could touch it for a holder it had; it only rises. It is open once that step
    is acknowledged. A block's generation rises each time it is handed out as new: (block, generation) names one use.
    """

    def __init__(self, num_blocks: int, stats: KvStats | None = None, catalogue: Catalogue | None = None) -> None:
        self.num_blocks = num_blocks
        self.stats = stats or KvStats()
        self.acknowledged_step = 0
        self.states = [BlockState.FREE] * num_blocks
        self.ref_counts = [0] * num_blocks
        self.generations = [0] * num_blocks if catalogue is None else catalogue.generations
        self._catalogue = catalogue
        self.fences = [0] * num_blocks
        self.keys: list[BlockKey | None] = [None] * num_blocks
        self.parents: list[BlockKey | None] = [None] * num_blocks
        """Key of the block before it in its prefix. Means something only where there is a key."""
        self.events = PoolEvents()
        self.free = list(range(num_blocks - 1, -1, -1))
        """A stack: the next one to hand out is the last."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self.granted: set[int] = set()
        self.digest_to_block: dict[bytes, int] = {}
        self._num_active = 0
        self._num_quarantined = 0
        self._quarantine: dict[int, list[int]] = {}
        """fence -> blocks that went into quarantine with it. An entry is stale if its block was hit since."""
        self._fences_closed: list[int] = []
        """Heap of the keys of `_quarantine`."""

    def counts(self) -> PoolCounts:
        return PoolCounts(
            free=len(self.free),
            granted=len(self.granted),
            active=self._num_active,
            cached=len(self.cached),
            quarantined=self._num_quarantined,
        )

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self.free) + len(self.cached)

    def find(self, key: BlockKey) -> int | None:
        """The block that holds this content, or None. Equal digests of different contents find nothing."""
        block_id = self.digest_to_block.get(key.digest)
        if block_id is None:
            return None
        published = self.keys[block_id]
        return block_id if published is not None and published.content == key.content else None

    def pin(self, block_id: int) -> None:
        """Add a reference to a block that `find` returned, or that is active."""
        state = self.states[block_id]
        if state is BlockState.CACHED:
            del self.cached[block_id]
        elif state is BlockState.QUARANTINED:
            self._num_quarantined -= 1
        elif state is not BlockState.ACTIVE:
            raise InternalError(f"block {block_id} cannot be shared: it is {state.name}")
        if state is not BlockState.ACTIVE:
            self.states[block_id] = BlockState.ACTIVE
            self._num_active += 1
        self.ref_counts[block_id] += 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` blocks, each with one reference, or none at all if fewer are available."""
        if num_blocks > self.num_available:
            return None
        taken = self._take(num_blocks, BlockState.ACTIVE)
        for block_id in taken:
            self.ref_counts[block_id] = 1
        self._num_active += num_blocks
        return taken

    def grant(self, num_blocks: int) -> list[int]:
        """Turn `num_blocks` available blocks into credits."""
        taken = self._take(num_blocks, BlockState.GRANTED)
        self.granted.update(taken)
        return taken

    def spend(self, block_id: int) -> None:
        """A credit becomes an active block with one reference. Raises ProtocolError if it is no credit."""
        self._take_credit(block_id)
        self.states[block_id] = BlockState.ACTIVE
        self.ref_counts[block_id] = 1
        self._num_active += 1

    def return_credit(self, block_id: int) -> None:
        """An unspent credit becomes free. Raises ProtocolError if it is no credit."""
        self._take_credit(block_id)
        self.states[block_id] = BlockState.FREE
        self.free.append(block_id)

    def publish(self, block_id: int, key: BlockKey, parent: BlockKey | None = None) -> None:
        """Make an active block findable. The first publisher of a digest wins: later ones stay without a key.

        `parent`: key of the block before it, None for the first of a sequence.
        """
        if self.keys[block_id] is None and key.digest not in self.digest_to_block:
            self.keys[block_id] = key
            self.digest_to_block[key.digest] = block_id
            self.parents[block_id] = parent
            if self._catalogue is not None:
                self._catalogue.put(block_id, key)
            if self.events.is_recording:
                parent_digest = b"" if parent is None else digest_of(parent)
                self.events.record(PoolEvent(EventKind.STORED, Tier.DEVICE, block_id, digest_of(key), parent_digest))

    def published_parent(self, block_id: int) -> int:
        """The block that can be found by the key of a published block's parent; -1 if there is none."""
        parent = self.parents[block_id]
        found = self.find(parent) if parent is not None else None
        return -1 if found is None else found

    def release(self, block_ids: Sequence[int], last_step: int) -> None:
        """Drop one reference from each block and raise its fence to `last_step`.

        The first in the sequence becomes the least recently used. A mention too many is refused: the others are
        released, then InternalError is raised.
        """
        ref_counts, fences = self.ref_counts, self.fences
        refused = []
        for block_id in block_ids:
            if ref_counts[block_id] < 1:
                refused.append(block_id)
                continue
            ref_counts[block_id] -= 1
            fences[block_id] = max(fences[block_id], last_step)
            if ref_counts[block_id] == 0:
                self._num_active -= 1
                self._retire(block_id)
        if refused:
            raise InternalError(f"blocks {refused} were released more often than they were held")

    def acknowledge(self, step: int) -> None:
        """Open all fences up to `step`. Raises ProtocolError if it lies before the last acknowledged one."""
        if step < self.acknowledged_step:
            raise ProtocolError(f"step {step} is acknowledged after step {self.acknowledged_step}")
        self.acknowledged_step = step
        while self._fences_closed and self._fences_closed[0] <= step:
            for block_id in self._quarantine.pop(heapq.heappop(self._fences_closed)):
                self._leave_quarantine(block_id)

    def take_over(self, holders: Mapping[int, int], granted: Set[int], fence: int) -> None:
        """Divide a fresh pool: `holders` counts references by block, `granted` are credits, the rest is quarantined
        until step `fence` is acknowledged. Generations and keys are already those of the pool."""
        self.free.clear()
        for block_id in reversed(range(self.num_blocks)):
            if block_id in holders:
                self.states[block_id] = BlockState.ACTIVE
                self.ref_counts[block_id] = holders[block_id]
                self._num_active += 1
            elif block_id in granted:
                self.states[block_id] = BlockState.GRANTED
                self.granted.add(block_id)
            else:
                self.fences[block_id] = fence
                self._retire(block_id)

    def _leave_quarantine(self, block_id: int) -> None:
        # A hit may have made the block active since this entry was made, and a later release may have brought it back
        # under a later fence, with an entry of its own.
        if self.states[block_id] is BlockState.QUARANTINED and self.fences[block_id] <= self.acknowledged_step:
            self._num_quarantined -= 1
            self._shelve(block_id)

    def _retire(self, block_id: int) -> None:
        fence = self.fences[block_id]
        if fence <= self.acknowledged_step:
            self._shelve(block_id)
            return
        self.states[block_id] = BlockState.QUARANTINED
        self._num_quarantined += 1
        waiting = self._quarantine.get(fence)
        if waiting is None:
            self._quarantine[fence] = [block_id]
            heapq.heappush(self._fences_closed, fence)
        else:
            waiting.append(block_id)

    def _shelve(self, block_id: int) -> None:
        if self.keys[block_id] is None:
            self.states[block_id] = BlockState.FREE
            self.free.append(block_id)
        else:
            self.states[block_id] = BlockState.CACHED
            self.cached[block_id] = None

    def _take(self, num_blocks: int, state: BlockState) -> list[int]:
        num_free = min(num_blocks, len(self.free))
        taken = [self.free.pop() for _ in range(num_free)]
        taken += self._evict(num_blocks - num_free)
        for block_id in taken:
            self.generations[block_id] += 1
            self.states[block_id] = state
        return taken

    def _evict(self, num_blocks: int) -> Iterable[int]:
        self.stats.num_evictions += num_blocks
        for _ in range(num_blocks):
            block_id, _ = self.cached.popitem(last=False)
            key = self.keys[block_id]
            assert key is not None
            del self.digest_to_block[key.digest]
            self.keys[block_id] = None
            if self.events.is_recording:
                self.events.record(PoolEvent(EventKind.EVICTED, Tier.DEVICE, block_id, digest_of(key), b""))
            yield block_id

    def _take_credit(self, block_id: int) -> None:
        if block_id not in self.granted:
            raise ProtocolError(f"block {block_id} is not a credit")
        self.granted.remove(block_id)
