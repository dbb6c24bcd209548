"""Log-probabilities of prompt tokens, from the hidden states of the rows that compute the prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.common.messages.generation import PromptLogprobs
from octavo.worker.prompt_parts import PromptPart

ROWS_AT_ONCE = 64
"""Positions whose logits are held at a time."""


@dataclass(frozen=True, slots=True)
class PendingPromptLogprobs:
    """Of all parts, joined; on the host once the step has ended."""

    parts: list[PromptPart]
    chosen: Tensor  # float32 [num_tokens]
    ranks: Tensor  # int64 [num_tokens]
    best_ids: Tensor  # int64 [num_tokens, max_top]
    best: Tensor  # float32 [num_tokens, max_top]

    def read(self) -> list[tuple[int, PromptLogprobs]]:
        """With the row of each."""
        chosen, ranks = self.chosen.tolist(), self.ranks.tolist()
        best_ids, best = self.best_ids.tolist(), self.best.tolist()
        found, end = [], 0
        for part in self.parts:
            begin, end = end, end + len(part.token_ids)
            top_ids = [token_id for row in best_ids[begin:end] for token_id in row[: part.num_top]]
            top = [logprob for row in best[begin:end] for logprob in row[: part.num_top]]
            found.append(
                (part.row, PromptLogprobs(part.start, chosen[begin:end], ranks[begin:end], part.num_top, top_ids, top))
            )
        return found


def prompt_logprobs(
    parts: list[PromptPart],
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    to_device: Callable[[Sequence[int]], Tensor],
    to_host: Callable[[Tensor], Tensor],
    rows_at_once: int = ROWS_AT_ONCE,
) -> PendingPromptLogprobs | None:
    """`hidden`, [num_tokens, hidden_size], is the whole step's; `logits_of` takes up to `rows_at_once` rows of it."""
    if not parts:
        return None
    places = to_device([part.first_hidden + index for part in parts for index in range(len(part.token_ids))])
    targets = to_device([token_id for part in parts for token_id in part.token_ids])
    num_top = max(1, *(part.num_top for part in parts), 1)
    pieces: list[tuple[Tensor, ...]] = []
    for first in range(0, len(targets), rows_at_once):
        some = slice(first, first + rows_at_once)
        logprobs = logits_of(hidden.index_select(0, places[some])).float().log_softmax(-1)
        chosen = logprobs.gather(1, targets[some, None])
        best = logprobs.topk(num_top)
        pieces.append((chosen[:, 0], (logprobs > chosen).sum(-1) + 1, best.indices, best.values))
    columns = [to_host(torch.cat(column)) for column in zip(*pieces, strict=True)]
    return PendingPromptLogprobs(parts, *columns)
