"""Owns the record of the last steps, stalls and ended requests, for pictures of what the scheduler does."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

MAX_STEPS = 2048
MAX_STALLS = 512
MAX_ENDED = 1024


class Step(NamedTuple):
    """A step whose result came. Times are seconds of the scheduler's clock."""

    step_id: int
    launched_at: float
    ended_at: float
    compute_us: int
    idle_us: int
    num_rows: int
    num_tokens: int
    num_prefill_tokens: int


class Stall(NamedTuple):
    """The pipeline had room, and what would fill it waited for the KV manager."""

    began_at: float
    ended_at: float
    cause: str


class EndedRequest(NamedTuple):
    """How a request went."""

    request_id: str
    ended_at: float
    ttft_s: float | None
    """Arrival to first token; None if it gave none."""
    decode_s: float
    """First token to end."""
    num_output_tokens: int
    num_choices: int
    is_failed: bool


Entry = TypeVar("Entry")


class Ring(Generic[Entry]):
    """The last entries, and how many there ever were."""

    def __init__(self, capacity: int) -> None:
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self.num_ever = 0

    def append(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.num_ever += 1

    def since(self, num_seen: int) -> tuple[list[Entry], int]:
        """Those after the first `num_seen`, as far as they are known, and how many are not."""
        num_new = self.num_ever - num_seen
        num_listed = min(num_new, len(self._entries))
        return list(islice(self._entries, len(self._entries) - num_listed, None)), num_new - num_listed


class Timeline:
    """Appended to once a step, a stall and a request. What a result brings is dated by the next `settle`."""

    def __init__(self) -> None:
        self.steps: Ring[Step] = Ring(MAX_STEPS)
        self.stalls: Ring[Stall] = Ring(MAX_STALLS)
        self.ended: Ring[EndedRequest] = Ring(MAX_ENDED)
        self._undated: list[Step] = []

    def step_is_back(self, step: Step) -> None:
        """`ended_at` of the step is not known yet."""
        self._undated.append(step)

    def settle(self, now: float) -> None:
        """Results told since the last time came now."""
        if self._undated:
            undated, self._undated = self._undated, []
            for step in undated:
                self.steps.append(step._replace(ended_at=now))

    def cursor(self) -> tuple[int, int, int]:
        """How far each record is."""
        return self.steps.num_ever, self.stalls.num_ever, self.ended.num_ever
