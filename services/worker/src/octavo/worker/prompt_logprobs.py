"""Log-probabilities of prompt tokens, from the hidden states of the rows that compute the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.common.messages.generation import PromptLogprobs
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan

ROWS_AT_ONCE = 64
"""Positions whose logits are held at a time."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What one row of a step says of its prompt."""

    row: int
    start: int
    """Index of the first token that is told of, in the prompt."""
    first_hidden: int
    """The step's token before it."""
    token_ids: tuple[int, ...]
    num_top: int


def prompt_parts(plan: StepPlan, slots: Sequence[OpenSlot | None]) -> list[PromptPart]:
    """Of the rows that are flagged so."""
    found, end = [], 0
    for row, (slot, start, length, flags) in enumerate(
        zip(plan.slots, plan.starts, plan.lengths, plan.flags, strict=True)
    ):
        begin, end = end, end + length
        opened = slots[slot]
        if not flags & RowFlag.PROMPT_LOGPROBS or opened is None or opened.rules is None:
            continue
        token_ids = opened.rules.prompt_token_ids[start + 1 : start + 1 + length]
        if token_ids:
            found.append(PromptPart(row, start + 1, begin, token_ids, opened.rules.num_prompt_logprobs or 0))
    return found


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


def check_flags(plan: StepPlan, slots: Mapping[int, OpenSlot | None]) -> str:
    """Empty, or what is wrong with the rows that are flagged. `slots` has those of the plan's rows."""
    for slot, flags in zip(plan.slots, plan.flags, strict=True):
        opened = slots[slot]
        has_prompt = opened is not None and opened.rules is not None and opened.rules.num_prompt_logprobs is not None
        if flags & RowFlag.PROMPT_LOGPROBS and not has_prompt:
            return f"slot {slot} is asked for log-probabilities of a prompt that it was not given"
    return ""
