"""Log-probabilities of a prompt, as they come and as answers show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.common.messages.generation import PromptLogprobs, TokenLogprobs
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.logprobs import finite


class PromptRecord:
    """Of one prompt: owns what is known of its tokens so far. The first has nothing before it, hence no entry."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.logprobs: list[TokenLogprobs | None] = [None]
        self._ranks: list[int] = [0]

    def add(self, told: PromptLogprobs) -> None:
        """They come in order."""
        for index, logprob in enumerate(told.logprobs):
            top = slice(index * told.num_top, (index + 1) * told.num_top)
            self.logprobs.append(TokenLogprobs(logprob, tuple(told.top_token_ids[top]), tuple(told.top_logprobs[top])))
        self._ranks += told.ranks

    def shown(self, pieces: TokenPieces, num_top: int) -> list[dict[str, Any] | None]:
        """For each token: the most likely ones, and itself, by id."""
        found: list[dict[str, Any] | None] = []
        for token_id, logprobs, rank in zip(self.token_ids, self.logprobs, self._ranks, strict=False):
            if logprobs is None:
                found.append(None)
                continue
            pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
            ranked = [(top_id, value, place) for place, (top_id, value) in enumerate(list(pairs)[:num_top], 1)]
            entries = {str(top_id): _entry(top_id, value, place, pieces) for top_id, value, place in ranked}
            entries.setdefault(str(token_id), _entry(token_id, logprobs.sampled, rank, pieces))
            found.append(entries)
        return found


def _entry(token_id: int, logprob: float, rank: int, pieces: TokenPieces) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": pieces.name(token_id)}
