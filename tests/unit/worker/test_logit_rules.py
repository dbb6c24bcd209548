"""What each rule does to logits, computed by hand, and what no rule may do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.messages.step import SlotRules
from octavo.common.messages.token_rules import TokenRules
from octavo.worker.logit_rules import MASKED, LogitRules
from octavo.worker.sampler import Draw, sample

CPU = torch.device("cpu")
LOGITS = [2.0, -1.0, 0.5, 1.0, -2.0, 0.0]
PROMPT = (0, 1)


def rules(
    output: tuple[int, ...] = (), ending: tuple[int, ...] = (), temperature: float = 1.0, **given: Any
) -> LogitRules:
    return LogitRules(SlotRules(TokenRules(**given), PROMPT, output, ending), temperature, len(LOGITS), CPU)


def changed(of: LogitRules, num_output: int = 0, logits: list[float] = LOGITS) -> list[float]:
    return of.apply(torch.tensor(logits), len(PROMPT) + num_output).tolist()  # type: ignore[no-any-return]


def kept(of: LogitRules, num_output: int = 0, logits: list[float] = LOGITS) -> list[int]:
    return [token_id for token_id, logit in enumerate(changed(of, num_output, logits)) if logit > MASKED / 2]


def test_presence_penalty_counts_a_token_of_the_output_once_and_the_prompt_not() -> None:
    assert changed(rules(output=(2, 2, 3), presence_penalty=0.5), 3) == [2.0, -1.0, 0.0, 0.5, -2.0, 0.0]


def test_frequency_penalty_counts_each_time_in_the_output() -> None:
    assert changed(rules(output=(2, 2, 3), frequency_penalty=0.5), 3) == [2.0, -1.0, -0.5, 0.5, -2.0, 0.0]


def test_repetition_penalty_counts_prompt_and_output_and_always_lowers() -> None:
    assert changed(rules(output=(2, 4), repetition_penalty=2.0), 2) == [1.0, -2.0, 0.25, 1.0, -4.0, 0.0]


def test_repetition_comes_before_frequency_and_presence_and_bias_before_all_of_them() -> None:
    of = rules(
        output=(3, 3), repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.125, logit_bias=((3, 3.0),)
    )
    assert changed(of, 2)[3] == (1.0 + 3.0) / 2.0 - 2 * 0.25 - 0.125


def test_a_token_that_is_drawn_counts_from_the_next_draw_on() -> None:
    of = rules(frequency_penalty=1.0)
    assert changed(of) == LOGITS
    of.push(torch.tensor([3]))
    of.push(torch.tensor([3]))
    assert changed(of, 2) == [2.0, -1.0, 0.5, -1.0, -2.0, 0.0]


def test_only_allowed_tokens_are_kept() -> None:
    assert kept(rules(allowed_token_ids=(1, 4))) == [1, 4]
    assert sample(
        torch.tensor([LOGITS]), [Draw((1,), 2, rules=rules(allowed_token_ids=(1, 4)))]
    ).token_ids.tolist() == [1]


def test_a_bias_can_make_a_token_win_but_not_bring_back_an_excluded_one() -> None:
    of = rules(allowed_token_ids=(1, 4), logit_bias=((4, 5.0), (0, 100.0)))
    assert sample(torch.tensor([LOGITS]), [Draw((1,), 2, rules=of)]).token_ids.tolist() == [4]


def test_the_last_token_of_a_bad_word_is_not_drawn_after_the_others() -> None:
    words = ((5,), (2, 3), (1, 2, 4))
    assert kept(rules(bad_words=words)) == [0, 1, 2, 3, 4]
    assert kept(rules(output=(2,), bad_words=words), 1) == [0, 1, 2, 4]
    assert kept(rules(output=(1, 2), bad_words=words), 2) == [0, 1, 2]
    assert kept(rules(output=(2, 1), bad_words=words), 2) == [0, 1, 2, 3, 4]


def test_the_prompt_does_not_begin_a_bad_word() -> None:
    assert kept(rules(bad_words=((1, 2),))) == [0, 1, 2, 3, 4, 5]


def test_tokens_that_are_drawn_begin_bad_words() -> None:
    of = rules(bad_words=((2, 3), (3, 3)))
    of.push(torch.tensor([2]))
    assert kept(of, 1) == [0, 1, 2, 4, 5]
    of.push(torch.tensor([5]))
    assert kept(of, 2) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("num_output", "is_kept"), [(0, False), (3, False), (4, True)])
def test_no_ending_token_is_drawn_before_min_tokens(num_output: int, is_kept: bool) -> None:
    of = rules(ending=(0, 5), min_tokens=4, logit_bias=((0, 100.0), (5, 100.0)))
    assert [token_id in kept(of, num_output) for token_id in (0, 5)] == [is_kept, is_kept]
    assert {1, 2, 3, 4} <= set(kept(of, num_output))


def test_a_rule_that_would_leave_no_token_is_not_applied() -> None:
    assert kept(rules(allowed_token_ids=(2, 3), bad_words=((2,), (3,)))) == [2, 3]
    assert kept(rules(ending=(2,), allowed_token_ids=(2,), min_tokens=9)) == [2]


@pytest.mark.parametrize(("min_p", "expected"), [(0.4, [0]), (0.3, [0, 3]), (0.13, [0, 2, 3, 5]), (1.0, [0])])
def test_min_p_is_a_share_of_the_most_likely_ones_probability(min_p: float, expected: list[int]) -> None:
    """Shares are exp(logit - 2): 1, 0.05, 0.22, 0.37, 0.02, 0.14."""
    assert kept(rules(min_p=min_p)) == expected


def test_min_p_is_of_the_probabilities_after_temperature_and_greedy_has_none() -> None:
    assert kept(rules(min_p=0.4, temperature=2.0)) == [0, 2, 3]  # shares exp((logit - 2) / 2): 0.47, 0.61; 0.37 for 5
    assert changed(rules(min_p=0.4, typical_p=0.1, temperature=0.0)) == LOGITS


def test_typical_p_keeps_the_tokens_of_nearly_the_expected_surprise() -> None:
    """Probabilities 0.5, 0.25, 0.125, 0.125: entropy 1.75 bits, surprises 1, 2, 3, 3; 1 is nearest by 2 - 1.75."""
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)] + [-80.0, -80.0]
    assert kept(rules(typical_p=0.2), logits=logits) == [1]
    assert kept(rules(typical_p=0.26), logits=logits) == [0, 1]
    assert kept(rules(typical_p=0.76), logits=logits) == [0, 1, 2]
    assert kept(rules(typical_p=0.9), logits=logits) == [0, 1, 2, 3]


def test_log_probabilities_are_those_of_the_model() -> None:
    of = rules(output=(0,), frequency_penalty=2.0, allowed_token_ids=(4, 5))
    sampled = sample(torch.tensor([LOGITS]), [Draw((1,), 3, num_logprobs=1, rules=of)])
    [logprobs] = sampled.logprobs
    assert logprobs is not None
    assert (sampled.token_ids.tolist(), logprobs.top_token_ids) == ([5], (0,))
    assert logprobs.sampled == pytest.approx(torch.tensor(LOGITS).log_softmax(-1)[5].item())


def test_logits_that_are_not_finite_are_told_even_where_they_are_masked() -> None:
    logits = torch.tensor([[math.nan, *LOGITS[1:]]])
    assert sample(logits, [Draw((1,), 2, rules=rules(allowed_token_ids=(1,)))]).token_ids.tolist() == [-1]


IDS = st.integers(0, len(LOGITS) - 1)
RULES = st.builds(
    TokenRules,
    allowed_token_ids=st.lists(IDS, max_size=3, unique=True).map(tuple),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    min_tokens=st.integers(0, 6),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=3).map(lambda found: tuple(found.items())),
    repetition_penalty=st.floats(0.01, 100),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0.01, 1),
)


@given(
    RULES,
    st.lists(IDS, max_size=6).map(tuple),
    st.lists(st.floats(-30, 30, width=32), min_size=len(LOGITS), max_size=len(LOGITS)),
    st.sampled_from([0.0, 0.01, 1.0, 2.0]),
)
def test_some_token_is_always_left_and_tokens_pushed_count_as_tokens_given(
    given_rules: TokenRules, output: tuple[int, ...], logits: list[float], temperature: float
) -> None:
    """A slot that is opened anew after a preemption does as the one that went on."""
    ending, position = (0, 5), len(PROMPT) + len(output)
    told = LogitRules(SlotRules(given_rules, PROMPT, output, ending), temperature, len(LOGITS), CPU)
    grown = LogitRules(SlotRules(given_rules, PROMPT, (), ending), temperature, len(LOGITS), CPU)
    for token_id in output:
        grown.push(torch.tensor([token_id]))
    given_logits = torch.tensor(logits)
    result = told.apply(given_logits, position)
    assert result.tolist() == grown.apply(given_logits, position).tolist()
    assert given_logits.tolist() == torch.tensor(logits).tolist()
    assert result.isfinite().all()
    assert (result > MASKED / 2).any()
    draw = Draw((1, 2), position, temperature, rules=told)
    for token_id in sample(given_logits[None], [draw]).token_ids.tolist():
        assert result[token_id] > MASKED / 2


def test_a_row_is_drawn_as_if_it_were_alone() -> None:
    logits = torch.randn((4, len(LOGITS)), generator=torch.Generator().manual_seed(1))

    def draws() -> list[Draw]:
        penalised = rules(output=(3, 3), frequency_penalty=2.0, min_p=0.05)
        return [
            Draw((7,), 4, 0.8),
            Draw((8, 9), 4, 0.8, rules=penalised),
            Draw((3,), 2),
            Draw((2,), 5, rules=penalised),
        ]

    together = sample(logits, draws()).token_ids.tolist()
    alone = [
        token for row, draw in enumerate(draws()) for token in sample(logits[row : row + 1], [draw]).token_ids.tolist()
    ]
    assert together == alone
