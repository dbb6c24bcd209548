"""Which cached block goes first: a segmented LRU, so that one long prompt does not flush what others share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from octavo.common.block_hash import BlockKey

_NOWHERE, _PROBATION, _PROTECTED = range(3)


class Evicted(NamedTuple):
    """A cached block that was handed out: what it held, under the generation that it had."""

    block_id: int
    generation: int
    key: BlockKey
    parent: BlockKey | None


class SegmentedLru:
    """Cached blocks in two queues, each least recently used first, as links in flat arrays.

        probation   blocks that nobody has hit since they were stored; evicted first
        protected   blocks that were hit; at most `max_protected`, the oldest beyond that go back to probation

    A scan of prompts that are seen once goes through probation alone. With `max_protected` 0 this is a plain LRU.
    """

    def __init__(self, num_blocks: int, max_protected: int) -> None:
        self._max_protected = max_protected
        ends = [num_blocks, num_blocks + 1]
        self._next = array("i", [*([-1] * num_blocks), *ends])
        self._previous = array("i", [*([-1] * num_blocks), *ends])
        self._probation_end, self._protected_end = ends
        self._segments = bytearray(num_blocks)
        self._was_hit = bytearray(num_blocks)
        self._num_probation = 0
        self._num_protected = 0

    def __len__(self) -> int:
        return self._num_probation + self._num_protected

    def __contains__(self, block_id: int) -> bool:
        return self._segments[block_id] != _NOWHERE

    def __iter__(self) -> Iterator[int]:
        """In the order in which they would be evicted."""
        for end in (self._probation_end, self._protected_end):
            block_id = self._next[end]
            while block_id != end:
                yield block_id
                block_id = self._next[block_id]

    def members(self) -> bytes:
        """A byte for each block of the pool, 0 for those that are not in here."""
        return bytes(self._segments)

    def note_hits(self, block_ids: Iterable[int]) -> None:
        """The blocks were found by a prefix. They need not be in here."""
        was_hit = self._was_hit
        for block_id in block_ids:
            was_hit[block_id] = True

    def note_stored(self, block_id: int) -> None:
        """The block holds new content, which nobody has hit."""
        self._was_hit[block_id] = False

    def add(self, block_ids: Iterable[int]) -> None:
        """The blocks were used just now, the last of them last."""
        following, previous, segments, was_hit = self._next, self._previous, self._segments, self._was_hit
        for block_id in block_ids:
            if was_hit[block_id]:
                segments[block_id] = _PROTECTED
                self._num_protected += 1
                end = self._protected_end
            else:
                segments[block_id] = _PROBATION
                self._num_probation += 1
                end = self._probation_end
            before = previous[end]
            following[before] = previous[end] = block_id
            previous[block_id] = before
            following[block_id] = end
        while self._num_protected > self._max_protected:
            oldest = following[self._protected_end]
            self.remove([oldest])
            was_hit[oldest] = False
            self.add([oldest])

    def remove(self, block_ids: Iterable[int]) -> None:
        """The blocks are in use again."""
        following, previous, segments = self._next, self._previous, self._segments
        for block_id in block_ids:
            if segments[block_id] == _PROBATION:
                self._num_probation -= 1
            else:
                self._num_protected -= 1
            segments[block_id] = _NOWHERE
            before, after = previous[block_id], following[block_id]
            following[before] = after
            previous[after] = before

    def pop(self, num_blocks: int) -> list[int]:
        """Take the blocks that should be evicted first. There are as many."""
        num_probation = min(num_blocks, self._num_probation)
        self._num_probation -= num_probation
        self._num_protected -= num_blocks - num_probation
        taken = self._take_first(self._probation_end, num_probation)
        return taken + self._take_first(self._protected_end, num_blocks - num_probation)

    def _take_first(self, end: int, num_blocks: int) -> list[int]:
        following, segments = self._next, self._segments
        taken = []
        block_id = following[end]
        for _ in range(num_blocks):
            taken.append(block_id)
            segments[block_id] = _NOWHERE
            block_id = following[block_id]
        following[end] = block_id
        self._previous[block_id] = end
        return taken
