"""What ends a sequence by its tokens."""

from __future__ import annotations

from typing import Any

from octavo.common.messages.generation import FinishReason
from octavo.scheduler.stopping import Ending, StopRules
from support.sequences import make_sequence

RULES = StopRules(frozenset({2, 3}), max_model_len=20)


def ending_of(*output: int, num_prompt_tokens: int = 10, **params: Any) -> Ending | None:
    sequence = make_sequence(num_prompt_tokens, **params)
    RULES.apply_to(sequence.request)
    sequence.token_ids.extend(output)
    return RULES.ending(sequence)


def test_sequence_goes_on_after_an_ordinary_token() -> None:
    assert ending_of(7) is None


def test_end_of_sequence_stops_without_naming_the_token() -> None:
    assert ending_of(7, 2) == Ending(FinishReason.STOP)
    assert ending_of(7, 3) == Ending(FinishReason.STOP)


def test_end_of_sequence_is_passed_over_on_request() -> None:
    assert ending_of(7, 2, ignore_eos=True) is None


def test_stop_token_is_named_and_holds_also_when_ends_are_ignored() -> None:
    assert ending_of(9, stop_token_ids=(8, 9)) == Ending(FinishReason.STOP, 9)
    assert ending_of(2, stop_token_ids=(2,), ignore_eos=True) == Ending(FinishReason.STOP, 2)
    assert ending_of(9, 7, stop_token_ids=(9,)) is None


def test_length_is_that_of_the_output() -> None:
    assert ending_of(7, 7, max_tokens=3) is None
    assert ending_of(7, 7, 7, max_tokens=3) == Ending(FinishReason.LENGTH)


def test_stop_on_the_last_token_allowed_is_a_stop() -> None:
    assert ending_of(7, 7, 2, max_tokens=3) == Ending(FinishReason.STOP)


def test_length_of_the_model_ends_a_sequence_too() -> None:
    assert ending_of(*[7] * 9) is None
    assert ending_of(*[7] * 10) == Ending(FinishReason.LENGTH)
    assert ending_of(7, num_prompt_tokens=19) == Ending(FinishReason.LENGTH)
