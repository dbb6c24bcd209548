"""Which tokens of prompts a step tells the log-probabilities of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan


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


def check_flags(plan: StepPlan, slots: Mapping[int, OpenSlot | None]) -> str:
    """Empty, or what is wrong with the rows that are flagged. `slots` has those of the plan's rows."""
    for slot, flags in zip(plan.slots, plan.flags, strict=True):
        opened = slots[slot]
        has_prompt = opened is not None and opened.rules is not None and opened.rules.num_prompt_logprobs is not None
        if flags & RowFlag.PROMPT_LOGPROBS and not has_prompt:
            return f"slot {slot} is asked for log-probabilities of a prompt that it was not given"
    return ""
