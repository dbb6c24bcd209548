"""The sequences of a request that is answered by beam search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.common.messages.generation import SampledToken, TokenLogprobs
from octavo.scheduler.beam_search import BeamAnswer, BeamGroup
from octavo.scheduler.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class BeamMoves:
    """What a decision changes. The sequences' tokens are changed already."""

    continued: list[Sequence]
    """Go on from themselves."""
    forked: list[tuple[Sequence, Sequence]]
    """(parent, child): the child shares all that the parent has computed."""
    dropped: list[Sequence]
    """Nobody continues them."""


class Beams:
    """One sequence per live beam. A beam waits with its result until all have theirs; then they move together.

    A result outlives the blocks that it was computed in: a beam that has one needs no blocks before the next move.
    """

    def __init__(self, group: BeamGroup, leader: Sequence, vocab_size: int) -> None:
        self.group = group
        self.sequences = [leader]
        """In the order of the group's live beams."""
        self._results: dict[int, TokenLogprobs] = {}
        num_reported = leader.request.params.num_logprobs or 0
        self.num_logprobs = max(min(group.num_candidates, vocab_size), num_reported)
        """Likeliest tokens that the worker is asked for at each place."""

    def has_result(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._results

    def take_result(self, sequence: Sequence, likeliest: TokenLogprobs) -> bool:
        """Whether all beams have their results now, so that `move` may be called."""
        self._results[sequence.sequence_id] = likeliest
        return len(self._results) == len(self.sequences)

    def move(self, spawn: Callable[[list[int]], Sequence]) -> BeamMoves:
        """Decide the next token of every beam. `spawn` makes a sequence of these tokens."""
        parents = self.sequences
        continuations = self.group.step([self._results[parent.sequence_id] for parent in parents])
        self._results.clear()
        moves = BeamMoves([], [], [])
        num_tokens = len(parents[0].token_ids)
        self.sequences = []
        moved: set[int] = set()
        for continuation in continuations:
            parent = parents[continuation.parent]
            if continuation.parent in moved:
                child = spawn([*parent.token_ids[:num_tokens], continuation.token_id])
                moves.forked.append((parent, child))
                self.sequences.append(child)
            else:
                moved.add(continuation.parent)
                parent.token_ids.append(continuation.token_id)
                moves.continued.append(parent)
                self.sequences.append(parent)
        moves.dropped.extend(parent for index, parent in enumerate(parents) if index not in moved)
        return moves


def answer_tokens(request: Request, choice_index: int, answer: BeamAnswer) -> list[SampledToken]:
    """What the gateway gets of an answer, with log-probabilities if it asked for any."""
    num_logprobs = request.params.num_logprobs
    return [
        SampledToken(
            request.request_no,
            choice_index,
            token.token_id,
            None
            if num_logprobs is None
            else TokenLogprobs(
                token.logprob, token.row.top_token_ids[:num_logprobs], token.row.top_logprobs[:num_logprobs]
            ),
        )
        for token in answer.tokens
    ]
