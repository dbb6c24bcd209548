"""The waiting queue and the slots of the worker."""

from __future__ import annotations

import heapq

from octavo.scheduler.sequence import Sequence, SequenceState


class WaitingQueue:
    """Sequences without blocks, oldest request first, where a priority counts as age.

    A preempted sequence comes back to its old place.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], Sequence]] = []
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._heap, (sequence.rank, sequence))
        self._num_waiting += 1

    def peek(self) -> Sequence | None:
        """The next in line."""
        while self._heap and self._heap[0][1].state is not SequenceState.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take the next in line, which `peek` has shown."""
        self._num_waiting -= 1
        return heapq.heappop(self._heap)[1]

    def discard(self, sequence: Sequence) -> None:
        """The sequence ends while it waits."""
        sequence.state = SequenceState.FINISHED
        self._num_waiting -= 1


class Slots:
    """The worker's rows. A slot freed in one step may be taken in the same: the plan closes before it opens."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._to_close: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int, is_open: bool) -> None:
        """`is_open`: the worker holds the slot open, and the next plan has to close it."""
        self._free.append(slot)
        if is_open:
            self._to_close.append(slot)

    def drain_closed(self) -> list[int]:
        """Slots that the next plan must close."""
        closed, self._to_close = self._to_close, []
        return closed
