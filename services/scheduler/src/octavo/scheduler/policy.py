"""Who runs in the next step, with how many tokens. Pure functions of the running sequences."""

from __future__ import annotations

from collections.abc import Iterable

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
    """The sequence to preempt: of the lowest priority, then the one with the least work to lose, then the newest.

    One that was preempted before is spared until it has sampled `min_progress` tokens since, unless all are such. So
    the sequence with the most work goes on until another has made progress, and somebody always does.
    """
    candidates = list(running)
    unspared = [one for one in candidates if not one.num_preemptions or one.num_new_tokens >= min_progress]
    return max(
        unspared or candidates,
        key=lambda sequence: (
            sequence.priority,
            -sequence.num_computed_tokens,
            sequence.arrival_no,
            -len(sequence.token_ids),
        ),
        default=None,
    )
