"""Few cases in which every pair of values of two axes meets, or nearly so."""

from __future__ import annotations

import itertools
import random


def pairwise_cases(axes: dict[str, list[object]], limit: int) -> list[dict[str, object]]:
    """Greedy: each case is the best of some random ones by the pairs of values that no case has yet."""
    names = list(axes)
    uncovered = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x in range(len(axes[names[a]]))
        for y in range(len(axes[names[b]]))
    }
    choose = random.Random(0)
    cases: list[dict[str, object]] = []
    while uncovered and len(cases) < limit:
        candidates = [[choose.randrange(len(axes[name])) for name in names] for _ in range(60)]
        gains = [set(itertools.combinations(list(enumerate(one)), 2)) & uncovered for one in candidates]
        best = max(range(len(candidates)), key=lambda index: len(gains[index]))
        if not gains[best]:
            continue
        uncovered -= gains[best]
        cases.append({name: axes[name][value] for name, value in zip(names, candidates[best], strict=True)})
    return cases


def case_name(case: dict[str, object]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in case.values())
