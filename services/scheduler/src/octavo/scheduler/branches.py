"""Choices that can be branched from: those that run, and those that are kept after their end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from octavo.common.errors import InvalidRequestError, UnknownResponseError
from octavo.common.messages.generation import BranchPoint
from octavo.scheduler.sequence import Request, Sequence, SequenceState


@dataclass(slots=True, eq=False)
class KeptChoice:
    """What is left of a choice after its end."""

    sequence: Sequence
    expires_at: float


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Where a branch begins."""

    parent: Sequence
    token_ids: list[int]
    """Prompt and output of the parent up to the branch."""

    @property
    def num_computed(self) -> int:
        """Leading positions whose blocks can be shared now."""
        if self.parent.state not in (SequenceState.RUNNING, SequenceState.LEAVING, SequenceState.KEPT):
            return 0
        return min(len(self.token_ids), self.parent.num_computed_tokens)


class KeptChoices:
    """Keeps at most `max_kept` choices until they expire, oldest first out.

    A kept sequence is KEPT as long as it holds its blocks, and FINISHED once they are gone; its tokens stay.
    """

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._kept: dict[tuple[bytes, str, int], KeptChoice] = {}
        """By salt, request id and choice; oldest first."""
        self._next_expiry = math.inf

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def with_blocks(self) -> Iterator[Sequence]:
        """Those that hold blocks, oldest first."""
        return (kept.sequence for kept in self._kept.values() if kept.sequence.state is SequenceState.KEPT)

    def keep(self, sequence: Sequence, expires_at: float) -> list[Sequence]:
        """Returns the sequences that have to go for it."""
        key = (sequence.request.salt, sequence.request.request_id, sequence.choice_index)
        gone = [self._kept.pop(key)] if key in self._kept else []
        self._kept[key] = KeptChoice(sequence, expires_at)
        self._next_expiry = min(self._next_expiry, expires_at)
        while len(self._kept) > self._max_kept:
            gone.append(self._kept.pop(next(iter(self._kept))))
        return [kept.sequence for kept in gone]

    def find(self, salt: bytes, point: BranchPoint) -> Sequence | None:
        kept = self._kept.get((salt, point.request_id, point.choice_index))
        return kept.sequence if kept is not None else None

    def forget(self, salt: bytes, request_id: str) -> list[Sequence]:
        """Returns the sequences that go."""
        return self._pop(key for key in self._kept if key[:2] == (salt, request_id))

    def expire(self, now: float) -> list[Sequence]:
        """Returns the sequences that go."""
        if now < self._next_expiry:
            return []
        gone = self._pop(key for key, kept in self._kept.items() if kept.expires_at <= now)
        self._next_expiry = min((kept.expires_at for kept in self._kept.values()), default=math.inf)
        return gone

    def _pop(self, keys: Iterable[tuple[bytes, str, int]]) -> list[Sequence]:
        return [self._kept.pop(key).sequence for key in list(keys)]


def find_shared_tokens(salt: bytes, point: BranchPoint, requests: Iterable[Request], kept: KeptChoices) -> SharedTokens:
    """The tokens that a new request of this salt shares with the choice that it names.

    Raises UnknownResponseError if there is no such choice, InvalidRequestError if it has fewer tokens.
    """
    parent = _find_live(salt, point, requests) or kept.find(salt, point)
    if parent is None:
        raise UnknownResponseError(
            f"no response {point.request_id!r} with a choice {point.choice_index} that can be branched from: it is"
            " unknown, it has ended without being kept, or it was kept and has expired"
        )
    num_tokens = len(parent.token_ids) if point.num_tokens is None else point.num_tokens
    if not 1 <= num_tokens <= len(parent.token_ids):
        raise InvalidRequestError(
            f"branch at {num_tokens} tokens; prompt and output of choice {point.choice_index} of {point.request_id!r}"
            f" have {len(parent.token_ids)} at present"
        )
    return SharedTokens(parent, parent.token_ids[:num_tokens])


def _find_live(salt: bytes, point: BranchPoint, requests: Iterable[Request]) -> Sequence | None:
    """The latest request of that id wins. Choices of a beam search exist only once it has ended."""
    found = None
    for request in requests:
        if request.request_id != point.request_id or request.salt != salt or request.beams is not None:
            continue
        if point.choice_index in request.live:
            found = request.live[point.choice_index] or request.leader
    return found
