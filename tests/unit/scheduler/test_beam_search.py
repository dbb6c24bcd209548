"""Beam search over made-up log-probabilities."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from octavo.common.messages.generation import FinishReason, TokenLogprobs
from octavo.scheduler.beam_search import BeamGroup, Continuation
from octavo.simulator.beam_reference import beam_answers

EOS = 0


def row(**logprobs: float) -> TokenLogprobs:
    """`row(t3=-0.5, t1=-2.0)`: the likeliest tokens of one place, best first."""
    ids = tuple(int(name[1:]) for name in logprobs)
    return TokenLogprobs(max(logprobs.values()), ids, tuple(logprobs.values()))


def group_of(width: int, max_output_tokens: int = 10, **options: object) -> BeamGroup:
    settings = {"length_penalty": 1.0, "early_stopping": False, "ending_token_ids": frozenset({EOS}), **options}
    return BeamGroup(width=width, max_output_tokens=max_output_tokens, **settings)  # type: ignore[arg-type]


def outputs(group: BeamGroup) -> list[list[int]]:
    return [[token.token_id for token in answer.tokens] for answer in group.answers]


def test_the_first_step_takes_different_tokens_of_the_prompt() -> None:
    group = group_of(2)
    assert group.num_candidates == 4
    assert group.step([row(t5=-0.1, t6=-1.0, t7=-2.0, t8=-3.0)]) == [Continuation(0, 5), Continuation(0, 6)]


def test_both_beams_may_come_from_one() -> None:
    group = group_of(2)
    group.step([row(t5=-0.1, t6=-3.0)])
    assert group.step([row(t1=-0.2, t2=-0.3), row(t3=-0.1)]) == [Continuation(0, 1), Continuation(0, 2)]


def test_an_ending_id_behind_the_width_is_no_answer() -> None:
    group = group_of(2)
    assert group.step([row(t5=-0.1, t6=-1.0, t0=-2.0, t8=-3.0)]) == [Continuation(0, 5), Continuation(0, 6)]
    assert group.answers == []


def test_ending_ids_leave_their_place_to_the_next_candidates() -> None:
    group = group_of(2)
    assert group.step([row(t0=-0.1, t6=-1.0, t7=-2.0, t8=-3.0)]) == [Continuation(0, 6), Continuation(0, 7)]
    assert outputs(group) == [[EOS]]
    assert group.answers[0].reason is FinishReason.STOP


def search_with_a_bad_answer(**options: object) -> BeamGroup:
    """Two steps after which the answers score -0.5 and -3.0, the best live beam -0.6."""
    group = group_of(2, **options)
    group.step([row(t5=-0.1, t0=-3.0, t6=-4.0)])
    group.step([row(t0=-0.9, t7=-1.1), row(t8=-1.0, t9=-2.0)])
    assert [round(answer.score, 6) for answer in group.answers] == [-0.5, -3.0]
    return group


def test_the_search_goes_on_while_a_live_beam_is_better_than_the_worst_answer() -> None:
    group = search_with_a_bad_answer()
    assert not group.is_over
    group.step([row(t0=-0.3, t1=-5.0), row(t1=-9.0, t2=-9.5)])
    assert outputs(group) == [[5, EOS], [5, 7, EOS]]
    assert group.is_over  # the best live beam is at -6.2 / 3


def test_early_stopping_ends_with_as_many_answers_as_beams() -> None:
    assert search_with_a_bad_answer(early_stopping=True).is_over


def test_the_last_place_ends_every_beam() -> None:
    group = group_of(2, max_output_tokens=1)
    assert group.step([row(t5=-0.1, t6=-1.0, t7=-2.0, t0=-3.0)]) == []
    assert group.is_over
    assert outputs(group) == [[5], [6]]
    assert [answer.reason for answer in group.answers] == [FinishReason.LENGTH] * 2


def test_a_length_penalty_prefers_long_or_short_answers() -> None:
    def answer(length_penalty: float) -> list[int]:
        group = group_of(2, max_output_tokens=2, length_penalty=length_penalty)
        group.step([row(t0=-1.0, t6=-1.0, t7=-9.0, t8=-9.5)])
        group.step([row(t5=-0.5, t4=-8.0, t0=-8.5, t3=-9.0), row(t5=-9.0, t4=-9.1, t0=-9.2, t3=-9.3)])
        return outputs(group)[0]

    assert answer(1.0) == [6, 5]  # -1.5 / 2 against -1.0
    assert answer(0.0) == [EOS]


@pytest.mark.parametrize("seed", range(200))
def test_any_search_finds_the_answers_of_a_plain_one(seed: int) -> None:
    dice = random.Random(seed)
    vocab_size = dice.choice([8, 20])
    ending_ids = frozenset(dice.sample(range(vocab_size), dice.choice([0, 1, 1, 2])))
    width = dice.choice([1, 2, 3, 4])
    options = {"length_penalty": dice.choice([-1.0, 0.0, 0.6, 1.0, 2.0]), "early_stopping": dice.random() < 0.5}
    max_tokens = dice.choice([1, 2, 7, 15])
    likes_to_end = dice.choice([0.0, 1.0, 3.0])

    def logprobs_after(tokens: Sequence[int]) -> dict[int, float]:
        table = random.Random(f"{seed} {list(tokens)}")
        weights = [table.gauss(0.0, 1.5) + (likes_to_end if token in ending_ids else 0) for token in range(vocab_size)]
        total = math.log(sum(map(math.exp, weights)))
        return {token: weight - total for token, weight in enumerate(weights)}

    expected = beam_answers(logprobs_after, [1], max_tokens, width=width, ending_ids=ending_ids, **options)
    group = group_of(width, max_tokens, ending_token_ids=ending_ids, **options)
    live: list[list[int]] = [[1]]
    while not group.is_over:
        rows = []
        for tokens in live:
            logprobs = logprobs_after(tokens)
            best = sorted(logprobs, key=lambda token: -logprobs[token])[: group.num_candidates]
            rows.append(TokenLogprobs(0.0, tuple(best), tuple(logprobs[token] for token in best)))
        live = [[*live[move.parent], move.token_id] for move in group.step(rows)]
    assert outputs(group) == expected
