"""From a request's options to the rules for logits that the worker applies."""

from __future__ import annotations

import math
import re

from octavo.common.messages.generation import ModelInfo
from octavo.common.messages.token_rules import MIN_REPETITION_PENALTY, NO_RULES, TokenRules
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError
from octavo.gateway.limits import at_most
from octavo.gateway.openai_schema import GenerationRequest
from octavo.gateway.token_ids import check_token_ids
from octavo.gateway.tokenization import ModelTokenizer

_MAX_BAD_CHARS = 2048  # about 2 ms of encoding, with and without a space
LEAST_SHARE = 2.0**-126
"""Of probability that a request may keep: it goes to the worker as a float of 32 bits, in which less is 0."""
_LEAST_REPETITION = math.ceil(MIN_REPETITION_PENALTY * 2**30) / 2**30
"""The least one that is not below the bound in 32 bits, which are 2^-30 apart around it."""
_INTEGER = re.compile(r"-?[0-9]{1,10}\Z")


def token_rules(
    request: GenerationRequest, config: GatewayConfig, model: ModelInfo, tokenizer: ModelTokenizer
) -> TokenRules | None:
    """None if the request leaves logits as they are. Raises FieldError."""
    rules = TokenRules(
        allowed_token_ids=_allowed_token_ids(request, model),
        bad_words=_bad_words(request, config, tokenizer),
        min_tokens=request.min_tokens or 0,
        logit_bias=_logit_bias(request, config, model),
        repetition_penalty=max(_given(request.repetition_penalty, 1.0), _LEAST_REPETITION),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        min_p=_given(request.min_p, 0.0),
        typical_p=max(_given(request.typical_p, 1.0), LEAST_SHARE),
    )
    _check_something_can_be_drawn(rules, request, model)
    return None if rules == NO_RULES else rules


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _allowed_token_ids(request: GenerationRequest, model: ModelInfo) -> tuple[int, ...]:
    token_ids = request.allowed_token_ids
    if token_ids is None:
        return ()
    if not token_ids:
        raise FieldError("allowed_token_ids", "allowed_token_ids: must not be empty", "invalid_value")
    at_most("allowed_token_ids", len(token_ids), model.vocab_size, "ids")
    check_token_ids(token_ids, "allowed_token_ids", model.vocab_size)
    return tuple(sorted(set(token_ids)))


def _bad_words(
    request: GenerationRequest, config: GatewayConfig, tokenizer: ModelTokenizer
) -> tuple[tuple[int, ...], ...]:
    words = request.bad_words or []
    at_most("bad_words", len(words), config.max_bad_words, "bad words")
    at_most("bad_words", sum(map(len, words)), _MAX_BAD_CHARS, "characters")
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        param = f"bad_words[{index}]"
        at_most(param, len(word), config.max_stop_chars, "characters")
        spellings = [token_ids for token_ids in tokenizer.spellings(word) if token_ids]
        if not word or not spellings:
            raise FieldError(param, f"{param}: gives no tokens", "invalid_value")
        found.update(dict.fromkeys(spellings))
    return tuple(found)


def _logit_bias(request: GenerationRequest, config: GatewayConfig, model: ModelInfo) -> tuple[tuple[int, float], ...]:
    biases = request.logit_bias or {}
    at_most("logit_bias", len(biases), config.max_logit_bias, "tokens")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        param = f"logit_bias.{key}"
        if not _INTEGER.match(key):
            raise FieldError("logit_bias", f"logit_bias: {key[:32]!r} is not an integer token id", "invalid_value")
        token_id = int(key)
        if not 0 <= token_id < model.vocab_size:
            message = f"{param}: token id {token_id} is not in the vocabulary, 0 to {model.vocab_size - 1}"
            raise FieldError(param, message, "token_out_of_range")
        if token_id in found:
            raise FieldError(param, f"{param}: token {token_id} is there twice", "invalid_value")
        found[token_id] = float(bias)
    return tuple(found.items())


def _check_something_can_be_drawn(rules: TokenRules, request: GenerationRequest, model: ModelInfo) -> None:
    """What can be known of it beforehand."""
    if not rules.allowed_token_ids:
        return
    ending = set(request.stop_token_ids or ()) | (set() if request.ignore_eos else set(model.eos_token_ids))
    if rules.min_tokens and ending.issuperset(rules.allowed_token_ids):
        message = "min_tokens: all of allowed_token_ids end the text, so no token could be drawn"
        raise FieldError("min_tokens", message, "invalid_value")
    banned = {word[0] for word in rules.bad_words if len(word) == 1}
    if banned.issuperset(rules.allowed_token_ids):
        message = "bad_words: forbid all of allowed_token_ids, so no token could be drawn"
        raise FieldError("bad_words", message, "invalid_value")
