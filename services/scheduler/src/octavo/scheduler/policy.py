"""Who runs in the next step, with how many tokens. Pure functions of the running sequences."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.scheduler.queues import place_in_line
from octavo.scheduler.sequence import Sequence


def share_budget(prefills: list[tuple[Sequence, int]], budget: int) -> list[tuple[Sequence, int]]:
    """Split `budget` tokens of a step among prompts that are being computed, given oldest first.

    `prefills` holds (sequence, tokens left). Each gets an equal share, or less if it needs less; what that leaves goes
    to the oldest. So no prompt waits for a longer one to finish.
    """
    if not prefills or budget <= 0:
        return []
    equal_share = budget // len(prefills)
    chosen = [min(num_left, equal_share) for _, num_left in prefills]
    budget -= sum(chosen)
    for index, (_, num_left) in enumerate(prefills):
        extra = min(num_left - chosen[index], budget)
        chosen[index] += extra
        budget -= extra
    return [(sequence, length) for (sequence, _), length in zip(prefills, chosen, strict=True) if length]


def has_prefill_backlog(num_tokens_left: Iterable[int], budget: int) -> bool:
    """Whether enough prompt tokens hold blocks already, so that admitting more would only make blocks idle.

    One prompt counts for at most half a step, so that a long one does not keep short ones out.
    """
    return sum(min(num_left, budget // 2 + 1) for num_left in num_tokens_left) >= budget


def choose_victim(running: Iterable[Sequence], min_progress: int = 1) -> Sequence | None:
    """The sequence to preempt: of the lowest priority, then the one with the least work to lose, then the last in turn.

    One that was preempted before is spared until it has sampled `min_progress` tokens since, unless all are such. So
    the sequence with the most work goes on until another has made progress, and somebody always does.
    """
    candidates = list(running)
    return _least_to_lose([one for one in candidates if _is_unspared(one, min_progress)] or candidates)


def goes_before(first: Sequence, other: Sequence) -> bool:
    """Whether `first` is more urgent, and `other` has not become so old that it would be before it in line all the
    same. So a sequence is overtaken only by so many later ones a level of priority."""
    return first.priority < other.priority and place_in_line(first) < place_in_line(other)


def choose_less_urgent(
    running: Iterable[Sequence], first: Sequence, min_progress: int, num_blocks: int = 0
) -> Sequence | None:
    """Who makes way for the first in line, which lacks a slot or `num_blocks` blocks: chosen as a victim is, of those
    that it goes before. Nobody does if all of these together hold fewer blocks.

    One that was preempted before and has not sampled `min_progress` tokens since is spared. So a sequence is paused at
    most once for each later one that may overtake it, and moves on between two pauses.
    """
    behind = [one for one in running if goes_before(first, one) and _is_unspared(one, min_progress)]
    if sum(len(one.block_table) for one in behind) < num_blocks:
        return None
    return _least_to_lose(behind)


def _is_unspared(sequence: Sequence, min_progress: int) -> bool:
    return not sequence.num_preemptions or sequence.num_new_tokens >= min_progress


def _least_to_lose(candidates: Iterable[Sequence]) -> Sequence | None:
    return max(
        candidates,
        key=lambda sequence: (
            sequence.priority,
            -sequence.num_computed_tokens,
            sequence.turn,
            -len(sequence.token_ids),
        ),
        default=None,
    )
