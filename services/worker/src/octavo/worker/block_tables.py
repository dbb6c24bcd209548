"""Owns the worker's mirror of the block tables on the host, by which plans are checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.common.errors import MessageGapError, ProtocolError, StaleBlockError
from octavo.common.messages.kv import BlockCopy
from octavo.common.messages.step import TableDelta


class BlockTables:
    """One row of block ids per slot, filled by deltas from the front.

    A block has one generation at a time; every table that lists it does so at that generation. So a block that comes at
    an older one, or at a newer one while a table still lists it, is refused.
    """

    def __init__(self, num_slots: int, max_blocks_per_seq: int, num_blocks: int) -> None:
        self.on_host = np.zeros((num_slots, max_blocks_per_seq), dtype=np.int32)
        self.num_entries = [0] * num_slots
        self._generations = [-1] * num_blocks  # block_id |-> the last one seen, -1 for none
        self._num_listings = [0] * num_blocks  # block_id |-> tables that list it

    def empty(self) -> None:
        """Empty all tables."""
        self.num_entries = [0] * len(self.num_entries)
        self._num_listings = [0] * len(self._num_listings)

    def forget_generations(self) -> None:
        """A new life of the pool, whose tables are empty."""
        self._generations = [-1] * len(self._generations)

    @property
    def generations(self) -> tuple[int, ...]:
        """Of each block the last one seen, -1 for none."""
        return tuple(self._generations)

    def check(self, cleared_slots: Iterable[int], deltas: Sequence[TableDelta]) -> dict[int, int]:
        """What `clear` and `append` would do, without doing it: the lengths of the tables that change.

        Slots must be in range. Raises MessageGapError if a delta does not start at the table's end, StaleBlockError by
        the rule of generations, ProtocolError if a block does not exist or a table would grow past its row.
        """
        lengths: dict[int, int] = {}
        listings: dict[int, int] = {}
        generations: dict[int, int] = {}
        for slot in cleared_slots:
            for block_id in self.on_host[slot, : self.num_entries[slot]].tolist():
                listings[block_id] = listings.get(block_id, 0) - 1
            lengths[slot] = 0
        for delta in deltas:
            length = lengths.get(delta.slot, self.num_entries[delta.slot])
            self._check_shape(delta, length)
            for block_id, generation in zip(delta.block_ids, delta.generations, strict=True):
                self._check_block(block_id, generation, listings, generations)
                listings[block_id] = listings.get(block_id, 0) + 1
                generations[block_id] = generation
            lengths[delta.slot] = length + len(delta.block_ids)
        return lengths

    def _check_shape(self, delta: TableDelta, length: int) -> None:
        if delta.start_index != length:
            raise MessageGapError(
                f"a delta for slot {delta.slot} starts at {delta.start_index}, but its table has {length} entries"
            )
        if len(delta.block_ids) != len(delta.generations):
            raise ProtocolError(f"{len(delta.block_ids)} blocks come with {len(delta.generations)} generations")
        if length + len(delta.block_ids) > self.on_host.shape[1]:
            raise ProtocolError(f"the table of slot {delta.slot} would grow past {self.on_host.shape[1]} entries")

    def _check_block(
        self, block_id: int, generation: int, listings: dict[int, int], generations: dict[int, int]
    ) -> None:
        if not 0 <= block_id < len(self._generations):
            raise ProtocolError(f"block {block_id} is not one of the {len(self._generations)} of the pool")
        if generation < 0:
            raise ProtocolError(f"block {block_id} comes at generation {generation}")
        known = generations.get(block_id, self._generations[block_id])
        if generation < known:
            raise StaleBlockError(f"block {block_id} comes at generation {generation}, after {known}")
        if generation > known and self._num_listings[block_id] + listings.get(block_id, 0):
            raise StaleBlockError(
                f"block {block_id} comes at generation {generation}, while a live table lists it at {known}"
            )

    @property
    def num_blocks(self) -> int:
        return len(self._generations)

    def generation(self, block_id: int) -> int:
        """The last one seen of the block; -1 for none."""
        return self._generations[block_id]

    def is_listed(self, block_id: int, cleared_slots: Iterable[int]) -> bool:
        """Whether a table lists the block, those of `cleared_slots` left out."""
        num_cleared = sum(block_id in self.on_host[slot, : self.num_entries[slot]] for slot in cleared_slots)
        return self._num_listings[block_id] > num_cleared

    def renew(self, block_id: int, generation: int) -> None:
        """The block, which no table lists, gets new content under this generation."""
        self._generations[block_id] = generation

    def check_copies(
        self, copies: Sequence[BlockCopy], cleared_slots: Iterable[int], deltas: Sequence[TableDelta]
    ) -> None:
        """Refuse a copy that reads or writes a block under an old generation.

        A source is looked at as it is before the deltas, since its new owner may come with the same plan; a target as
        it is after them. Raises StaleBlockError, or ProtocolError if a block does not exist.
        """
        if not copies:
            return
        copied: dict[int, int] = {}
        given = {
            block_id: generation
            for delta in deltas
            for block_id, generation in zip(delta.block_ids, delta.generations, strict=True)
        }
        cleared = [self.on_host[slot, : self.num_entries[slot]].tolist() for slot in cleared_slots]
        num_cleared = Counter(block_id for block_ids in cleared for block_id in block_ids)
        for copy in copies:
            for block_id in (copy.source_id, copy.target_id):
                if not 0 <= block_id < len(self._generations):
                    raise ProtocolError(f"a copy names block {block_id}, which is not one of {len(self._generations)}")
            source, target = copy.source_id, copy.target_id
            known = copied.get(source, self._generations[source])
            if copy.source_generation < known:
                raise StaleBlockError(
                    f"a copy reads block {source} at generation {copy.source_generation}, after {known}"
                )
            known = given.get(target, self._generations[target])
            is_listed = target in given or self._num_listings[target] > num_cleared[target]
            if copy.target_generation < known or (copy.target_generation > known and is_listed):
                raise StaleBlockError(
                    f"a copy writes block {target} at generation {copy.target_generation}; it is at {known}"
                )
            copied[target] = copy.target_generation

    def note_copies(self, copies: Sequence[BlockCopy]) -> None:
        """Keep the generations of the targets of copies that `check_copies` has passed."""
        for copy in copies:
            self._generations[copy.target_id] = copy.target_generation

    def clear(self, slot: int) -> None:
        """Empty the slot's table."""
        for block_id in self.on_host[slot, : self.num_entries[slot]].tolist():
            self._num_listings[block_id] -= 1
        self.num_entries[slot] = 0

    def append_on_host(self, deltas: Sequence[TableDelta]) -> tuple[list[int], list[int]]:
        """Apply deltas that `check` has passed.

        Returns the places, slot * max_blocks_per_seq + entry, and the block ids that the device must be given.
        """
        places: list[int] = []
        block_ids: list[int] = []
        for delta in deltas:
            end = delta.start_index + len(delta.block_ids)
            self.on_host[delta.slot, delta.start_index : end] = delta.block_ids
            self.num_entries[delta.slot] = end
            first = delta.slot * self.on_host.shape[1] + delta.start_index
            places.extend(range(first, first + len(delta.block_ids)))
            block_ids.extend(delta.block_ids)
            for block_id, generation in zip(delta.block_ids, delta.generations, strict=True):
                self._generations[block_id] = generation
                self._num_listings[block_id] += 1
        return places, block_ids
