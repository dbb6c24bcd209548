"""The waiting queue and the slots of the worker."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.turns import Turns

TURNS_PER_PRIORITY = 1000
"""Turns that one level of priority is worth. So nobody waits for more than so many later ones a level and tenant, times
the tenant's weight."""


def place_in_line(sequence: Sequence) -> tuple[float, int]:
    """The lowest goes first."""
    return sequence.turn + TURNS_PER_PRIORITY * sequence.priority, sequence.sequence_id


@dataclass(slots=True)
class _Line:
    """Those that wait at one priority, not all of them: some that have ended are still in it."""

    served: float
    """The highest turn that was served of it, or of any line before it was there."""
    heap: list[tuple[float, int, Sequence]] = field(default_factory=list)


class WaitingQueue:
    """Sequences without blocks: by priority and turn. A preempted one comes back to its old place.

    Some are parked: each waits for its leader, a running sequence that computes its next block. They are not in line
    until `wake` or `expire` brings them back.
    """

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        """By priority. An empty one is gone with the next look at it."""
        self._turns = Turns()
        self._served = 0.0
        """The highest turn that was served."""
        self._num_waiting = 0
        self._num_of_tenant: Counter[str] = Counter()
        """Those that wait, by tenant; none of them is 0."""
        self._followers: dict[int, dict[int, Sequence]] = {}
        """leader |-> its followers, by id."""
        self._first_deadline = math.inf

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_parked(self) -> int:
        return sum(map(len, self._followers.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        for line in self._lines.values():
            for *_, sequence in line.heap:
                if sequence.state is SequenceState.WAITING:
                    yield sequence
        for followers in self._followers.values():
            yield from followers.values()

    def has_any_of(self, tenant: str) -> bool:
        """Whether something of the tenant waits."""
        return tenant in self._num_of_tenant

    def take_turns(self, tenant: str, weight: int, priority: int, num_choices: int = 1) -> float:
        """The first turn of a request that arrives: behind its tenant's others, in fairness beside other tenants'."""
        line = self._line(priority)
        return self._turns.take(tenant, weight, num_choices, line.served if line else self._served)

    def push(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        self._enqueue(sequence)
        self._count(sequence, 1)

    def peek(self) -> Sequence | None:
        """The next in line."""
        line = self._first_line()
        return line.heap[0][2] if line else None

    def pop(self) -> Sequence:
        """Take the next in line, which `peek` has shown."""
        line = self._first_line()
        assert line is not None, "nothing waits in line"
        sequence = heapq.heappop(line.heap)[2]
        line.served = max(line.served, sequence.turn)
        self._served = max(self._served, sequence.turn)
        self._count(sequence, -1)
        return sequence

    def park(self, sequence: Sequence, leader: Sequence, deadline: float) -> None:
        """The sequence waits for the leader until `deadline`, and lends it its priority."""
        sequence.state = SequenceState.WAITING
        sequence.leader_id = leader.sequence_id
        sequence.flight_deadline = deadline
        leader.priority = min(leader.priority, sequence.priority)
        self._followers.setdefault(leader.sequence_id, {})[sequence.sequence_id] = sequence
        self._count(sequence, 1)
        self._first_deadline = min(self._first_deadline, deadline)

    def wake(self, leader_id: int) -> None:
        """The leader has published a block, or computes no more: its followers are in line again."""
        if leader_id in self._followers:
            for sequence in self._followers.pop(leader_id).values():
                self._enqueue(sequence)

    def wake_all(self) -> None:
        for leader_id in list(self._followers):
            self.wake(leader_id)

    def expire(self, now: float) -> None:
        """Followers whose deadline has passed are in line again, and will compute for themselves."""
        if now < self._first_deadline:
            return
        self._first_deadline = math.inf
        for sequence in [sequence for followers in self._followers.values() for sequence in followers.values()]:
            if sequence.flight_deadline <= now:
                self._unpark(sequence)
                sequence.computes_itself = True
                self._enqueue(sequence)
            else:
                self._first_deadline = min(self._first_deadline, sequence.flight_deadline)

    def discard(self, sequence: Sequence) -> None:
        """The sequence ends while it waits."""
        self._unpark(sequence)
        sequence.state = SequenceState.FINISHED
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, change: int) -> None:
        tenant = sequence.request.tenant
        self._num_waiting += change
        self._num_of_tenant[tenant] += change
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant]

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.leader_id = 0
        line = self._line(sequence.priority)
        if line is None:
            line = self._lines[sequence.priority] = _Line(self._served)
        heapq.heappush(line.heap, (*place_in_line(sequence), sequence))

    def _line(self, priority: int) -> _Line | None:
        """The line at a priority, with one that waits at its head; None if nobody does."""
        line = self._lines.get(priority)
        if line is None:
            return None
        while line.heap and line.heap[0][2].state is not SequenceState.WAITING:
            heapq.heappop(line.heap)
        if not line.heap:
            del self._lines[priority]
            return None
        return line

    def _first_line(self) -> _Line | None:
        """The line whose head goes first."""
        lines = (self._line(priority) for priority in list(self._lines))
        return min((line for line in lines if line is not None), key=lambda line: line.heap[0], default=None)

    def _unpark(self, sequence: Sequence) -> None:
        followers = self._followers.get(sequence.leader_id)
        if followers is None:
            return
        del followers[sequence.sequence_id]
        if not followers:
            del self._followers[sequence.leader_id]


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
