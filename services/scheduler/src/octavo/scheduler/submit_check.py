"""Whether a request can be served at all: nothing that could break a step gets past here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.common.errors import InvalidRequestError, PromptTooLongError, TokenOutOfRangeError
from octavo.common.messages.generation import ModelInfo, SamplingParams, Submit
from octavo.common.messages.token_rules import TokenRules

MAX_LENGTH_PENALTY = 16.0
"""Either way; an output's length to a larger power may leave the range of floats."""


def check_submit(submit: Submit, num_shared_tokens: int, model: ModelInfo, max_num_choices: int) -> None:
    """`num_shared_tokens` come before the submitted prompt. Raises InvalidRequestError or a subclass."""
    prompt, params = submit.prompt_token_ids, submit.params
    num_prompt_tokens = num_shared_tokens + len(prompt)
    if not num_prompt_tokens:
        raise InvalidRequestError("the prompt has no tokens")
    _check_ids("prompt token", prompt, model)
    _check_ids("stop token", params.stop_token_ids, model)
    if not 1 <= params.n <= max_num_choices:
        raise InvalidRequestError(f"n is {params.n}; 1 to {max_num_choices} are served")
    if submit.weight < 1:
        raise InvalidRequestError("weight is below 1")
    if params.max_tokens < 1:
        raise InvalidRequestError("max_tokens is below 1")
    if num_prompt_tokens + params.max_tokens > model.max_model_len:
        raise PromptTooLongError(
            f"{num_prompt_tokens} prompt tokens and max_tokens {params.max_tokens} exceed {model.max_model_len}"
        )
    if not (0.0 <= params.temperature < float("inf") and 0.0 < params.top_p <= 1.0 and params.top_k >= 0):
        raise InvalidRequestError("temperature, top_p or top_k is out of range")
    if params.num_logprobs is not None and not 0 <= params.num_logprobs <= model.vocab_size:
        raise InvalidRequestError("logprobs is out of range")
    if params.num_prompt_logprobs is not None:
        if not 0 <= params.num_prompt_logprobs <= model.vocab_size:
            raise InvalidRequestError("prompt_logprobs is out of range")
        if num_shared_tokens or params.beam_width:
            raise InvalidRequestError("neither a branch nor a beam search tells of its prompt")
    if params.rules is not None:
        _check_rules(params.rules, params, model)
    if not (math.isfinite(submit.keep_s) and submit.keep_s >= 0.0):
        raise InvalidRequestError("keep is out of range")
    if params.beam_width:
        _check_beams(params, model)
    if submit.resumed:
        _check_resumed(submit, model)


def _check_resumed(submit: Submit, model: ModelInfo) -> None:
    params = submit.params
    if submit.branch is not None or params.beam_width:
        raise InvalidRequestError("neither a branch nor a beam search goes on with output tokens")
    choices = [choice.choice_index for choice in submit.resumed]
    if len(set(choices)) < len(choices) or not all(0 <= choice < params.n for choice in choices):
        raise InvalidRequestError("a resumed choice is none of the request's, or stands there twice")
    for choice in submit.resumed:
        output = choice.output_token_ids
        if not 1 <= len(output) < params.max_tokens:
            raise InvalidRequestError(f"choice {choice.choice_index} goes on after {len(output)} tokens")
        _check_ids(f"output of choice {choice.choice_index}: token", output, model)


def _check_ids(what: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        place = next(place for place, token_id in enumerate(token_ids) if not 0 <= token_id < model.vocab_size)
        raise TokenOutOfRangeError(f"{what} {place} is {token_ids[place]}; ids end at {model.vocab_size - 1}")


def _check_rules(rules: TokenRules, params: SamplingParams, model: ModelInfo) -> None:
    if params.beam_width:
        raise InvalidRequestError("beam search takes logits as they are")
    if problem := rules.what_is_wrong(model.vocab_size):
        raise InvalidRequestError(problem)
    if rules.min_tokens > params.max_tokens:
        raise InvalidRequestError(f"min_tokens {rules.min_tokens} is above max_tokens {params.max_tokens}")


def _check_beams(params: SamplingParams, model: ModelInfo) -> None:
    if not params.n <= params.beam_width <= model.max_num_seqs:
        raise InvalidRequestError(
            f"a beam search of width {params.beam_width} with {params.n} answers; the width is at least the number of"
            f" answers, and at most {model.max_num_seqs}, the sequences that can run at once"
        )
    if params.beam_width + len(model.eos_token_ids) + len(params.stop_token_ids) > model.vocab_size:
        raise InvalidRequestError(f"the vocabulary is too small for {params.beam_width} beams")
    if params.temperature != 0.0:
        raise InvalidRequestError("beam search does not sample: its temperature is 0")
    if not -MAX_LENGTH_PENALTY <= params.length_penalty <= MAX_LENGTH_PENALTY:
        raise InvalidRequestError(f"length_penalty is beyond {MAX_LENGTH_PENALTY}")
