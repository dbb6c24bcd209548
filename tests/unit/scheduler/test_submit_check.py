"""What a gateway let through is looked at once more, before any of it can break a step that others share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.common.errors import InvalidRequestError, PromptTooLongError, TokenOutOfRangeError
from octavo.common.messages.generation import ModelInfo, ResumedChoice, SamplingParams, Submit
from octavo.common.messages.token_rules import TokenRules
from octavo.scheduler.submit_check import check_submit

NAN = float("nan")
MODEL = ModelInfo("m", max_model_len=64, vocab_size=100, eos_token_ids=(99,), max_num_seqs=4, block_size=16)
GOOD = Submit(1, "r", (5, 6, 7), SamplingParams(max_tokens=8))


def check(submit: Submit) -> None:
    check_submit(submit, 0, MODEL, max_num_choices=8)


def test_what_can_be_served_passes() -> None:
    check(GOOD)
    rules = TokenRules(allowed_token_ids=(0, 99), logit_bias=((99, -100.0),), min_tokens=8, bad_words=((1, 2),))
    check(replace(GOOD, params=SamplingParams(max_tokens=61, stop_token_ids=(0, 99), rules=rules)))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"prompt_token_ids": ()}, InvalidRequestError, "no tokens"),
        ({"prompt_token_ids": (5, 100)}, TokenOutOfRangeError, "prompt token 1 is 100; ids end at 99"),
        ({"prompt_token_ids": (-1,)}, TokenOutOfRangeError, "prompt token 0 is -1"),
        ({"prompt_token_ids": (5,) * 57}, PromptTooLongError, "57 prompt tokens and max_tokens 8 exceed 64"),
        ({"keep_s": NAN}, InvalidRequestError, "keep"),
        ({"weight": 0}, InvalidRequestError, "weight"),
        ({"resumed": (ResumedChoice(0, (5, 100)),)}, TokenOutOfRangeError, "output of choice 0: token 1 is 100"),
        ({"resumed": (ResumedChoice(1, (5,)),)}, InvalidRequestError, "none of the request's"),
        ({"resumed": (ResumedChoice(0, (5,) * 8),)}, InvalidRequestError, "after 8 tokens"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    changed: dict[str, Any], error: type[InvalidRequestError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(replace(GOOD, **changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n is 0"),
        ({"n": 9}, "1 to 8"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": NAN}, "top_p"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"num_logprobs": 101}, "logprobs"),
        ({"num_prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop_token_ids": (5, 100)}, "stop token 1 is 100"),
        ({"stop_token_ids": (-1,)}, "stop token 0 is -1"),
        ({"beam_width": 5}, "beam search of width 5"),
        ({"beam_width": 2, "temperature": 1.0}, "does not sample"),
        ({"beam_width": 2, "temperature": 0.0, "length_penalty": NAN}, "length_penalty"),
    ],
)
def test_options_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check(replace(GOOD, params=replace(GOOD.params, **changed)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_token_ids": (100,)},
        {"bad_words": ((5, -1),)},
        {"bad_words": ((),)},
        {"logit_bias": ((100, 1.0),)},
        {"logit_bias": ((5, NAN),)},
        {"logit_bias": ((5, 1.0), (5, 2.0))},
        {"min_tokens": 9},
        {"min_tokens": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": NAN},
        {"frequency_penalty": NAN},
        {"presence_penalty": 2.5},
        {"min_p": NAN},
        {"typical_p": 0.0},
    ],
)
def test_rules_that_a_worker_cannot_apply_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        check(replace(GOOD, params=replace(GOOD.params, rules=TokenRules(**wrong))))
