"""Owns the state of every KV block of one pool: who may have it next."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import cast

from octavo.common.block_hash import UNKNOWN_KEY, BlockKey, digest_of
from octavo.common.errors import InternalError, ProtocolError
from octavo.common.messages.kv import PoolCounts
from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.catalogue import Catalogue
from octavo.kvmanager.eviction import Evicted, SegmentedLru
from octavo.kvmanager.miss_reasons import FLUSHED, PrefixHistory
from octavo.kvmanager.pool_events import EventKind, PoolEvent, PoolEvents, Tier
from octavo.kvmanager.quarantine import Quarantine
from octavo.kvmanager.stats import KvStats

PROTECTED_SHARE = 0.8
"""Share of a pool's blocks that may be cached blocks protected from scans. See `SegmentedLru`."""

_LOOKUPS_AT_ONCE = 64


class BlockPool:
    """Hands out KV blocks and takes them back. Every block is in exactly one BlockState.

    Most recently freed first keeps the memory that is touched small: a worker's pool may be mapped lazily.

    A block's generation rises each time it is handed out as new: (block, generation) names one use.
    """

    def __init__(
        self,
        num_blocks: int,
        stats: KvStats | None = None,
        catalogue: Catalogue | None = None,
        protected_share: float = PROTECTED_SHARE,
    ) -> None:
        self.num_blocks = num_blocks
        self.stats = stats or KvStats()
        self.quarantine = Quarantine(num_blocks)
        self.states = [BlockState.FREE] * num_blocks
        self.ref_counts = [0] * num_blocks
        self.generations = array("i", bytes(4 * num_blocks)) if catalogue is None else catalogue.generations
        self._catalogue = catalogue
        self.keys: list[BlockKey | None] = [None] * num_blocks
        self.parents: list[BlockKey | None] = [None] * num_blocks
        """Key of the block before it in its prefix. Means something only where there is a key."""
        self.events = PoolEvents()
        self.free = list(range(num_blocks - 1, -1, -1))
        """A stack: the next one to hand out is the last."""
        self.cached = SegmentedLru(num_blocks, int(protected_share * num_blocks))
        self.granted: set[int] = set()
        self.key_to_block: dict[BlockKey, int] = {}
        self.history = PrefixHistory(num_blocks, self.keys, self.key_to_block)
        self.keeps_evicted = False
        """Evicted blocks are put aside for `take_evicted`."""
        self._evicted: list[Evicted] = []
        self._num_active = self._num_quarantined = self._num_transferring = 0

    def counts(self, host_free: int = 0, host_swapped: int = 0, host_cached: int = 0) -> PoolCounts:
        """Blocks by state, beside those of the host, which are counted elsewhere."""
        return PoolCounts(
            free=len(self.free),
            granted=len(self.granted),
            active=self._num_active,
            cached=len(self.cached),
            quarantined=self._num_quarantined,
            transferring=self._num_transferring,
            host_free=host_free,
            host_swapped=host_swapped,
            host_cached=host_cached,
        )

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out."""
        return len(self.free) + len(self.cached)

    def find(self, key: BlockKey) -> int | None:
        """The block that holds this content, or None."""
        block_id = self.key_to_block.get(key)
        return None if block_id is None or self.states[block_id] is BlockState.TRANSFERRING else block_id

    def find_run(self, keys: Sequence[BlockKey], num_blocks: int) -> list[int]:
        """The blocks of the leading keys, at most `num_blocks`, up to the first that is not found."""
        found: list[int] = []
        for first in range(0, num_blocks, _LOOKUPS_AT_ONCE):
            some = list(map(self.key_to_block.get, keys[first : min(first + _LOOKUPS_AT_ONCE, num_blocks)]))
            if None in some:
                found += cast(list[int], some[: some.index(None)])
                break
            found += cast(list[int], some)
        if self._num_transferring:
            states = self.states
            for index, block_id in enumerate(found):
                if states[block_id] is BlockState.TRANSFERRING:
                    return found[:index]
        return found

    def pin(self, block_id: int) -> None:
        """Add a reference to a block that `find` returned, or that is active."""
        state = self.states[block_id]
        if state is BlockState.CACHED:
            self.cached.remove([block_id])
        elif state is BlockState.QUARANTINED:
            self._num_quarantined -= 1
        elif state is not BlockState.ACTIVE:
            raise InternalError(f"block {block_id} cannot be shared: it is {state.name}")
        if state is not BlockState.ACTIVE:
            self.states[block_id] = BlockState.ACTIVE
            self._num_active += 1
        self.ref_counts[block_id] += 1

    def pin_hits(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each of these blocks, which a prefix was found in."""
        states, ref_counts = self.states, self.ref_counts
        cached, quarantined = BlockState.CACHED, BlockState.QUARANTINED
        self.cached.remove([block_id for block_id in block_ids if states[block_id] is cached])
        for block_id in block_ids:
            state = states[block_id]
            if state is cached or state is quarantined:
                self._num_active += 1
                if state is quarantined:
                    self._num_quarantined -= 1
                states[block_id] = BlockState.ACTIVE
            elif state is not BlockState.ACTIVE:
                raise InternalError(f"block {block_id} cannot be shared: it is {state.name}")
            ref_counts[block_id] += 1
        self.cached.note_hits(block_ids)

    def allocate(self, num_blocks: int, sequence_id: int = 0) -> list[int] | None:
        """Take `num_blocks` blocks, each with one reference, or none at all if fewer are available.

        `sequence_id`: for whom, so that it can be told why a block was evicted.
        """
        if num_blocks > self.num_available:
            return None
        taken = self._take(num_blocks, BlockState.ACTIVE, sequence_id)
        for block_id in taken:
            self.ref_counts[block_id] = 1
        self._num_active += num_blocks
        return taken

    def put_run_first(self, num_blocks: int) -> bool:
        """Make the lowest run of `num_blocks` free neighbours what is allocated next. False: there is none so long."""
        free = sorted(self.free)
        first = 0
        for place, block_id in enumerate(free):
            if block_id != free[first] + place - first:
                first = place
            if place - first + 1 == num_blocks:
                run = free[first : place + 1]
                self.free = [*free[:first], *free[place + 1 :]][::-1] + run[::-1]
                return True
        return num_blocks == 0

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

    def publish(
        self, block_id: int, key: BlockKey, parent: BlockKey | None = None, kind: EventKind = EventKind.STORED
    ) -> None:
        """Make an active block findable. The first publisher of a key wins: later ones stay without one.

        `parent`: key of the block before it, None for the first of a sequence. `kind`: as what it is recorded.
        """
        if self.keys[block_id] is None and key not in self.key_to_block:
            self.keys[block_id] = key
            self.key_to_block[key] = block_id
            self.parents[block_id] = parent
            self.cached.note_stored(block_id)
            self.history.note_stored(block_id, key)
            if self._catalogue is not None:
                self._catalogue.put(block_id, key)
            if self.events.is_recording:
                parent_digest = b"" if parent is None else digest_of(parent)
                self.events.record(PoolEvent(kind, Tier.DEVICE, block_id, digest_of(key), parent_digest))

    def restore(self, keys: Mapping[int, BlockKey]) -> None:
        """Blocks of a fresh pool hold these contents already; what came before each in its prefix is not known."""
        for block_id, key in keys.items():
            self.publish(block_id, key, UNKNOWN_KEY)
        self.free = [block_id for block_id in self.free if self.keys[block_id] is None]
        self._shelve(block_id for block_id in keys if self.keys[block_id] is not None)

    def note_generation(self, block_id: int, generation: int) -> None:
        """The block is at this generation; under another one than this pool's it holds something else than it knows."""
        if generation == self.generations[block_id]:
            return
        self.generations[block_id] = generation
        key = self.keys[block_id]
        if key is not None:
            self._forget_key(block_id, key, EventKind.EVICTED, 0)
            if self.states[block_id] is BlockState.CACHED:
                self.cached.remove([block_id])
                self._shelve([block_id])

    def published_parent(self, block_id: int) -> int:
        """The block that can be found by the key of a published block's parent; -1 if there is none."""
        parent = self.parents[block_id]
        found = self.find(parent) if parent is not None else None
        return -1 if found is None else found

    def flush(self, matches: Callable[[BlockKey], bool]) -> tuple[int, int]:
        """Blocks whose key matches lose it. Returns how many of them are free now, and how many are not."""
        num_freed = num_used = 0
        for block_id, key in enumerate(self.keys):
            if key is None or not matches(key):
                continue
            self._forget_key(block_id, key, EventKind.FLUSHED, FLUSHED)
            if self._catalogue is not None:
                self._catalogue.forget(block_id)
            if self.states[block_id] is BlockState.CACHED:
                self.cached.remove([block_id])
                self._shelve([block_id])
                num_freed += 1
            else:
                num_used += 1
        return num_freed, num_used

    def release(self, block_ids: Sequence[int], last_step: int) -> None:
        """Drop one reference from each block and raise its fence to `last_step`.

        The first in the sequence becomes the least recently used. A mention too many is refused: the others are
        released, then InternalError is raised.
        """
        ref_counts, fences, states, active = self.ref_counts, self.quarantine.fences, self.states, BlockState.ACTIVE
        refused = []
        unheld = []
        for block_id in block_ids:
            if ref_counts[block_id] < 1:
                refused.append(block_id)
                continue
            ref_counts[block_id] -= 1
            if fences[block_id] < last_step:
                fences[block_id] = last_step
            if ref_counts[block_id] == 0 and states[block_id] is active:
                unheld.append(block_id)
        self._num_active -= len(unheld)
        self._retire(unheld)
        if refused:
            raise InternalError(f"blocks {refused} were released more often than they were held")

    def begin_copies_out(self, block_ids: Sequence[int], last_step: int) -> None:
        """Active blocks give up their only reference, and stay as they are until a copy has read them."""
        fences = self.quarantine.fences
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            fences[block_id] = max(fences[block_id], last_step)
        self.begin_copies_in(block_ids)

    def begin_copies_in(self, block_ids: Sequence[int]) -> None:
        """Active blocks that hold nothing yet wait for a copy that fills them."""
        for block_id in block_ids:
            if self.states[block_id] is not BlockState.ACTIVE:
                raise InternalError(f"block {block_id} cannot be copied: it is {self.states[block_id].name}")
            self.states[block_id] = BlockState.TRANSFERRING
        self._num_active -= len(block_ids)
        self._num_transferring += len(block_ids)

    def end_transfer(self, block_id: int) -> None:
        """The copy has ended: a block without a holder goes where released blocks go."""
        self._num_transferring -= 1
        if self.ref_counts[block_id]:
            self.states[block_id] = BlockState.ACTIVE
            self._num_active += 1
        else:
            self._retire([block_id])

    def take_evicted(self) -> list[Evicted]:
        """Blocks that were evicted since the last call, first evicted first."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def acknowledge(self, step: int) -> None:
        """Open all fences up to `step`. Raises ProtocolError if it lies before the last acknowledged one."""
        states, quarantined = self.states, BlockState.QUARANTINED
        leaving = [block_id for block_id in self.quarantine.acknowledge(step) if states[block_id] is quarantined]
        self._num_quarantined -= len(leaving)
        self._shelve(leaving)

    def vacate(self) -> None:
        """Nobody holds a block but credits, and no step is on its way: every block is cached or free, and steps count
        from 1 anew."""
        for block_id in list(self.granted):
            self.return_credit(block_id)
        self.acknowledge(max(self.quarantine.acknowledged_step, max(self.quarantine.fences)))
        self.quarantine = Quarantine(self.num_blocks)
        self.history.forget_sequences()

    def take_over(self, holders: Mapping[int, int], granted: Set[int], fence: int) -> None:
        """Divide a pool in which nobody holds a block: `holders` counts references by block, `granted` are credits, the
        rest is quarantined until step `fence` is acknowledged. Generations and keys are already those of the pool."""
        self.free.clear()
        self.cached.remove(list(self.cached))
        for block_id in reversed(range(self.num_blocks)):
            if block_id in holders:
                self.states[block_id] = BlockState.ACTIVE
                self.ref_counts[block_id] = holders[block_id]
                self._num_active += 1
            elif block_id in granted:
                self.states[block_id] = BlockState.GRANTED
                self.granted.add(block_id)
            else:
                self.quarantine.fences[block_id] = fence
                self._retire([block_id])

    def _retire(self, block_ids: list[int]) -> None:
        """Nobody holds these blocks any more."""
        fences, step = self.quarantine.fences, self.quarantine.acknowledged_step
        closed = [block_id for block_id in block_ids if fences[block_id] > step]
        if not closed:
            self._shelve(block_ids)
            return
        if len(closed) < len(block_ids):
            self._shelve([block_id for block_id in block_ids if fences[block_id] <= step])
        self._num_quarantined += len(closed)
        for block_id in closed:
            self.states[block_id] = BlockState.QUARANTINED
        self.quarantine.put(closed)

    def _shelve(self, block_ids: Iterable[int]) -> None:
        states, keys = self.states, self.keys
        cached = []
        for block_id in block_ids:
            if keys[block_id] is None:
                states[block_id] = BlockState.FREE
                self.free.append(block_id)
            else:
                states[block_id] = BlockState.CACHED
                cached.append(block_id)
        self.cached.add(cached)

    def _take(self, num_blocks: int, state: BlockState, sequence_id: int = 0) -> list[int]:
        num_free = min(num_blocks, len(self.free))
        taken = self.free[len(self.free) - num_free :][::-1]
        del self.free[len(self.free) - num_free :]
        taken += self._evict(num_blocks - num_free, sequence_id)
        generations, states = self.generations, self.states
        for block_id in taken:
            generations[block_id] += 1
            states[block_id] = state
        return taken

    def _evict(self, num_blocks: int, sequence_id: int) -> list[int]:
        if not num_blocks:
            return []
        self.stats.num_evictions += num_blocks
        block_ids = self.cached.pop(num_blocks)
        all_keys, key_to_block = self.keys, self.key_to_block
        keys = cast(list[BlockKey], [all_keys[block_id] for block_id in block_ids])
        self.history.note_gone(keys, sequence_id)
        for block_id, key in zip(block_ids, keys, strict=True):
            del key_to_block[key]
            all_keys[block_id] = None
        if self.keeps_evicted:
            generations, parents = self.generations, self.parents
            self._evicted += [
                Evicted(block_id, generations[block_id], key, parents[block_id])
                for block_id, key in zip(block_ids, keys, strict=True)
            ]
        self._record(EventKind.EVICTED, block_ids, keys)
        return block_ids

    def _record(self, kind: EventKind, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Blocks lost their keys."""
        if self.events.is_recording:
            for block_id, key in zip(block_ids, keys, strict=True):
                self.events.record(PoolEvent(kind, Tier.DEVICE, block_id, digest_of(key), b""))

    def _forget_key(self, block_id: int, key: BlockKey, kind: EventKind, for_sequence_id: int) -> None:
        del self.key_to_block[key]
        self.keys[block_id] = None
        self._record(kind, [block_id], [key])
        self.history.note_gone([key], for_sequence_id)

    def _take_credit(self, block_id: int) -> None:
        if block_id not in self.granted:
            raise ProtocolError(f"block {block_id} is not a credit")
        self.granted.remove(block_id)
