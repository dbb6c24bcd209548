"""How the budget of a step is shared, and who is preempted."""

from __future__ import annotations

import pytest

from octavo.scheduler.policy import choose_less_urgent, choose_victim, has_prefill_backlog, share_budget
from octavo.scheduler.queues import TURNS_PER_PRIORITY
from octavo.scheduler.sequence import Sequence
from support.sequences import make_sequence


def shares(lengths: list[int], budget: int) -> list[int]:
    """What each prompt gets, 0 for those left out."""
    prefills = [(make_sequence(length), length) for length in lengths]
    given = {id(sequence): share for sequence, share in share_budget(prefills, budget)}
    return [given.get(id(sequence), 0) for sequence, _ in prefills]


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([100], 512, [100]),
        ([100], 32, [32]),
        ([20_000, 20], 512, [492, 20]),  # the short one does not wait for the long one
        ([20, 20_000], 512, [20, 492]),
        ([20_000, 20, 20], 512, [472, 20, 20]),
        ([300, 300], 512, [256, 256]),
        ([20_000, 300], 512, [256, 256]),  # nor does one that needs more than a share
        ([300, 20, 300], 512, [300, 20, 192]),  # what is left over goes to the oldest
        ([5, 5, 5], 12, [4, 4, 4]),
        ([1, 1, 1], 2, [1, 1, 0]),
        ([100, 100], 0, [0, 0]),
        ([100], -3, [0]),
        ([], 512, []),
    ],
)
def test_shares_of_a_step(lengths: list[int], budget: int, expected: list[int]) -> None:
    assert shares(lengths, budget) == expected


def test_the_whole_budget_is_used_if_prompts_need_it() -> None:
    for lengths in ([9, 40, 3], [100, 1, 1, 1, 50], [16, 16, 17]):
        for budget in (1, 7, 32, 48):
            given = shares(lengths, budget)
            assert sum(given) == min(budget, sum(lengths))
            assert all(0 <= share <= length for share, length in zip(given, lengths, strict=True))


def test_backlog_is_a_step_full_of_prompt_tokens() -> None:
    assert not has_prefill_backlog([], 512)
    assert not has_prefill_backlog([511], 512)
    assert has_prefill_backlog([200, 200, 112], 512)


def test_one_long_prompt_is_no_backlog() -> None:
    assert not has_prefill_backlog([20_000], 512)
    assert has_prefill_backlog([20_000, 20_000], 512)


def test_victim_is_of_the_lowest_priority_and_then_the_one_with_the_least_work_to_lose() -> None:
    urgent, long, short = (make_sequence(turn=number) for number in (1, 2, 3))
    urgent.priority, long.priority, short.priority = -1, 2, 2
    urgent.num_computed_tokens, long.num_computed_tokens, short.num_computed_tokens = 5, 90, 40
    assert choose_victim([urgent, long, short]) is short
    assert choose_victim([urgent, long]) is long


def test_a_victim_is_spared_until_it_has_made_progress_unless_there_is_nobody_else() -> None:
    spared, other = make_sequence(turn=2), make_sequence(turn=1)
    spared.num_preemptions, spared.num_tokens_at_start = 1, len(spared.token_ids)
    other.num_computed_tokens = 50
    assert choose_victim([spared, other], min_progress=2) is other
    assert choose_victim([spared], min_progress=2) is spared
    spared.token_ids.extend([4, 4])
    assert choose_victim([spared, other], min_progress=2) is spared


def test_victim_is_of_the_request_that_came_last() -> None:
    oldest, middle, last = (make_sequence(turn=number) for number in (1, 2, 3))
    assert choose_victim([last, oldest, middle]) is last


def test_of_choices_of_one_request_the_shortest_is_the_victim() -> None:
    first, second = make_sequence(turn=4), make_sequence(turn=4)
    first.token_ids.append(5)
    assert choose_victim([first, second]) is second


def test_nobody_runs_so_nobody_is_a_victim() -> None:
    running: list[Sequence] = []
    assert choose_victim(running) is None


def test_only_a_strictly_less_urgent_one_makes_way_and_the_least_urgent_first() -> None:
    urgent, equal, less, least = (make_sequence(turn=number) for number in (9, 1, 2, 3))
    less.priority, least.priority = 1, 2
    assert choose_less_urgent([equal, less, least], urgent, min_progress=2) is least
    assert choose_less_urgent([equal, less], urgent, min_progress=2) is less
    assert choose_less_urgent([equal], urgent, min_progress=2) is None


def test_one_that_was_paused_makes_way_again_only_after_progress_even_if_there_is_nobody_else() -> None:
    urgent, paused = make_sequence(turn=2), make_sequence(turn=1)
    paused.priority, paused.num_preemptions, paused.num_tokens_at_start = 1, 1, len(paused.token_ids)
    assert choose_less_urgent([paused], urgent, min_progress=2) is None
    paused.token_ids.extend([4, 4])
    assert choose_less_urgent([paused], urgent, min_progress=2) is paused


def test_nobody_makes_way_for_one_that_is_behind_it_in_line_by_age() -> None:
    old = make_sequence(turn=1)
    old.priority = 2
    last_before = make_sequence(turn=2 * TURNS_PER_PRIORITY)
    first_behind = make_sequence(turn=2 * TURNS_PER_PRIORITY + 2)
    assert choose_less_urgent([old], last_before, min_progress=2) is old
    assert choose_less_urgent([old], first_behind, min_progress=2) is None


def test_nobody_makes_way_for_blocks_if_all_together_hold_too_few() -> None:
    urgent, less, least = (make_sequence(turn=number) for number in (9, 2, 3))
    less.priority, least.priority = 1, 2
    less.block_table, least.block_table = [1, 2, 3], [4, 5]
    assert choose_less_urgent([less, least], urgent, min_progress=2, num_blocks=5) is least
    assert choose_less_urgent([less, least], urgent, min_progress=2, num_blocks=6) is None
