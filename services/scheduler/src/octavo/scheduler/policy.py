"""Who runs in the next step, with how many tokens. Pure functions of the running sequences."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.scheduler.sequence import Sequence


def share_budget(prefills: list[tuple[Sequence, int]], budget: int) -> list[tuple[Sequence, int]]:
    """Split `budget` tokens of a step among prompts that are being computed, given oldest first.

    `prefills` holds (sequence, tokens left). Those that need no more than an equal share get all they need; what is
    left goes to the others, oldest first. So a short prompt never waits for a long one to finish, and the oldest long
    prompt still gets at least an equal share in every step.
    """
    if not prefills or budget <= 0:
        return []
    equal_share = budget // len(prefills)
    chosen: dict[int, int] = {}
    for index, (_, num_left) in enumerate(prefills):
        if num_left <= equal_share:
            chosen[index] = num_left
            budget -= num_left
    for index, (_, num_left) in enumerate(prefills):
        if index not in chosen and budget > 0:
            chosen[index] = min(num_left, budget)
            budget -= chosen[index]
    return [(prefills[index][0], chosen[index]) for index in sorted(chosen)]


def has_prefill_backlog(num_tokens_left: Iterable[int], budget: int) -> bool:
    """Whether enough prompt tokens hold blocks already, so that admitting more would only make blocks idle.

    One prompt counts for at most half a step, so that a long one does not keep short ones out.
    """
    return sum(min(num_left, budget // 2 + 1) for num_left in num_tokens_left) >= budget


def choose_victim(running: Iterable[Sequence]) -> Sequence | None:
    """The sequence to preempt: of the lowest priority, then of the request that came last, so that the oldest always
    makes progress.

    Among the choices of one request, the one with the least work to lose.
    """
    return max(
        running,
        key=lambda sequence: (sequence.priority, sequence.arrival_no, -len(sequence.token_ids)),
        default=None,
    )
