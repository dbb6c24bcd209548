"""Which cached block goes first: a segmented LRU, so that one long prompt does not flush what others share."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_NOWHERE, _PROBATION, _PROTECTED = range(3)


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

    @property
    def num_protected(self) -> int:
        return self._num_protected

    def note_hit(self, block_id: int) -> None:
        """The block was found by a prefix. It need not be in here."""
        self._was_hit[block_id] = True

    def note_stored(self, block_id: int) -> None:
        """The block holds new content, which nobody has hit."""
        self._was_hit[block_id] = False

    def add(self, block_id: int) -> None:
        """The block was used just now."""
        if not self._was_hit[block_id]:
            self._segments[block_id] = _PROBATION
            self._num_probation += 1
            self._link(block_id, self._probation_end)
            return
        self._segments[block_id] = _PROTECTED
        self._num_protected += 1
        self._link(block_id, self._protected_end)
        if self._num_protected > self._max_protected:
            self._demote_oldest()

    def remove(self, block_id: int) -> None:
        """The block is in use again."""
        if self._segments[block_id] == _PROBATION:
            self._num_probation -= 1
        else:
            self._num_protected -= 1
        self._segments[block_id] = _NOWHERE
        before, after = self._previous[block_id], self._next[block_id]
        self._next[before] = after
        self._previous[after] = before

    def pop(self) -> int:
        """Take the block that should be evicted first. There is one."""
        block_id = self._next[self._probation_end if self._num_probation else self._protected_end]
        self.remove(block_id)
        return block_id

    def _demote_oldest(self) -> None:
        block_id = self._next[self._protected_end]
        self.remove(block_id)
        self._was_hit[block_id] = False
        self.add(block_id)

    def _link(self, block_id: int, end: int) -> None:
        before = self._previous[end]
        self._next[before] = block_id
        self._previous[block_id] = before
        self._next[block_id] = end
        self._previous[end] = block_id
