"""Owns the fences of one pool: which blocks a step that is on its way may still touch, though nobody holds them."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable

from octavo.common.errors import ProtocolError


class Quarantine:
    """A block's fence is the last step that could touch it for a holder it had; it only rises. It is open once that
    step is acknowledged.

    A block that is hit while it waits here leaves without notice, so what `acknowledge` names may be elsewhere by then.
    """

    def __init__(self, num_blocks: int) -> None:
        self.acknowledged_step = 0
        self.fences = array("q", bytes(8 * num_blocks))
        self._waiting: dict[int, list[int]] = {}
        """fence -> blocks that came here with it"""
        self._closed: list[int] = []
        """Heap of the keys of `_waiting`."""

    def put(self, block_ids: Iterable[int]) -> None:
        """These blocks wait for their fences, which are closed."""
        for block_id in block_ids:
            fence = self.fences[block_id]
            waiting = self._waiting.get(fence)
            if waiting is None:
                self._waiting[fence] = [block_id]
                heapq.heappush(self._closed, fence)
            else:
                waiting.append(block_id)

    def acknowledge(self, step: int) -> list[int]:
        """Open all fences up to `step`; which blocks need not wait any more, first come first, each once.

        Raises ProtocolError if the step lies before the last acknowledged one.
        """
        if step < self.acknowledged_step:
            raise ProtocolError(f"step {step} is acknowledged after step {self.acknowledged_step}")
        self.acknowledged_step = step
        opened: dict[int, None] = {}
        while self._closed and self._closed[0] <= step:
            opened.update(dict.fromkeys(self._waiting.pop(heapq.heappop(self._closed))))
        # One that was hit may have come back under a later fence, with an entry of its own.
        return [block_id for block_id in opened if self.fences[block_id] <= step]
