"""Beam search over log-probabilities, in the order of events of transformers' `generate(num_beams=...)`.

At each step the best `num_candidates` continuations of all live beams are looked at, best first. One that ends (an
ending id, or the last place there is) becomes an answer if it is among the first `width`; the first `width` that do
not end are the live beams of the next step. The score of an answer is its log-probability divided by
(its length, with the ending id) ** length_penalty; the `width` best answers are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.common.messages.generation import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class BeamToken:
    """One output token of a beam, and all those before it. Beams share what they have in common."""

    token_id: int
    logprob: float
    row: TokenLogprobs
    """The likeliest tokens of its place."""
    before: BeamToken | None


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """A beam that has ended."""

    score: float
    last: BeamToken
    reason: FinishReason

    @property
    def tokens(self) -> list[BeamToken]:
        """In order."""
        found, token = [], self.last
        while True:
            found.append(token)
            if token.before is None:
                return found[::-1]
            token = token.before


@dataclass(frozen=True, slots=True)
class Continuation:
    """A live beam of the next step."""

    parent: int
    """Index of the live beam that it continues."""
    token_id: int


@dataclass(frozen=True, slots=True)
class _LiveBeam:
    logprob: float
    """Of all its output tokens together."""
    last: BeamToken | None


class BeamGroup:
    """The live beams and the answers of one search. Starts with one live beam, the prompt."""

    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        early_stopping: bool,
        ending_token_ids: frozenset[int],
        max_output_tokens: int,
    ) -> None:
        self.num_candidates = max(2, 1 + len(ending_token_ids)) * width
        """Likeliest tokens that are needed of each live beam: enough to go on if every ending id is among them."""
        self.answers: list[BeamAnswer] = []
        """Best first. At least `width` of them once the search is over."""
        self.is_over = False
        self._width = width
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._ending_token_ids = ending_token_ids
        self._max_output_tokens = max_output_tokens
        self._num_output_tokens = 0
        self._live = [_LiveBeam(0.0, None)]

    def step(self, rows: Sequence[TokenLogprobs]) -> list[Continuation]:
        """Take the likeliest next tokens of each live beam, in the order of the last continuations.

        Gives the live beams of the next step, best first; none once the search is over.
        """
        self._num_output_tokens += 1
        is_last = self._num_output_tokens >= self._max_output_tokens
        live: list[_LiveBeam] = []
        continuations: list[Continuation] = []
        for rank, (logprob, parent, token) in enumerate(self._candidates(rows)):
            is_ending_id = token.token_id in self._ending_token_ids
            if is_ending_id or is_last:
                if rank < self._width:
                    reason = FinishReason.STOP if is_ending_id else FinishReason.LENGTH
                    self._keep(BeamAnswer(self._score(logprob), token, reason))
            elif len(live) < self._width:
                live.append(_LiveBeam(logprob, token))
                continuations.append(Continuation(parent, token.token_id))
        self.is_over = not live or self._cannot_improve(live[0].logprob)
        self._live = [] if self.is_over else live
        return [] if self.is_over else continuations

    def _candidates(self, rows: Sequence[TokenLogprobs]) -> list[tuple[float, int, BeamToken]]:
        """(log-probability of the beam with it, parent, token), best first."""
        found = [
            (beam.logprob + logprob, parent, BeamToken(token_id, logprob, row, beam.last))
            for parent, (beam, row) in enumerate(zip(self._live, rows, strict=True))
            for token_id, logprob in zip(row.top_token_ids, row.top_logprobs, strict=True)
        ]
        found.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2].token_id))
        return found[: self.num_candidates]

    def _score(self, logprob: float) -> float:
        """Of a beam with as many tokens as there are now."""
        return float(logprob / self._num_output_tokens**self._length_penalty)

    def _keep(self, answer: BeamAnswer) -> None:
        self.answers.append(answer)
        self.answers.sort(key=lambda kept: -kept.score)
        del self.answers[self._width :]

    def _cannot_improve(self, best_live_logprob: float) -> bool:
        if len(self.answers) < self._width:
            return False
        return self._early_stopping or self._score(best_live_logprob) <= self.answers[-1].score
