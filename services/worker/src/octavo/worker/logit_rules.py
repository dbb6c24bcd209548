"""Owns the tokens that one slot's rules look at, and changes its logits by them.

Everything stays on the device: neither `apply` nor `push` asks the host for a value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.common.messages.step import SlotRules
from octavo.worker.grammars import WAIT_S, GrammarMatcher

MASKED = -1e30
"""Logit of a token that must not be drawn. Finite, since logits that are not are taken for a fault of the model."""

_ANY, _NONE = -1, -2  # in place of a token before the start of a bad word, and before the start of the output


class LogitRules:
    """The rules of one open slot. `temperature` is the slot's; `matcher` follows its grammar, if it has one."""

    def __init__(
        self,
        slot: SlotRules,
        temperature: float,
        vocab_size: int,
        device: torch.device,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        rules = slot.rules
        self._matcher = matcher
        self._follows: Tensor | None = None  # bool [vocab_size], of the grammar
        self._rules = rules
        self._temperature = temperature
        self._num_prompt_tokens = len(slot.prompt_token_ids)
        self._device = device
        self._is_allowed = self._to_device(_among(rules.allowed_token_ids, vocab_size))
        self._is_ending = self._to_device(_among(slot.ending_token_ids, vocab_size))
        self._bias_ids = self._to_device(np.array([token_id for token_id, _ in rules.logit_bias], dtype=np.int64))
        self._biases = self._to_device(np.array([bias for _, bias in rules.logit_bias], dtype=np.float32))
        self._is_in_prompt = self._to_device(_among(slot.prompt_token_ids, vocab_size))
        counts = np.bincount(np.array(slot.output_token_ids, dtype=np.int64), minlength=vocab_size)
        self._counts = self._to_device(counts.astype(np.float32))
        """How often each token is in the output."""
        self._one = torch.ones(1, device=device)
        self._begin_bad_words(slot)

    def _begin_bad_words(self, slot: SlotRules) -> None:
        words = slot.rules.bad_words
        length = max(map(len, words), default=1) - 1
        starts = [(_ANY,) * (length + 1 - len(word)) + word[:-1] for word in words]
        self._bad_starts = self._to_device(np.array(starts, dtype=np.int64).reshape(len(words), length))
        self._bad_ends = self._to_device(np.array([word[-1] for word in words], dtype=np.int64))
        last = [_NONE] * length + [*slot.output_token_ids]
        self._last_tokens = self._to_device(np.array(last[len(last) - length :], dtype=np.int64))
        """The end of the output, as long as the longest start of a bad word."""

    @property
    def has_grammar(self) -> bool:
        return self._matcher is not None

    def tell(self, token_ids: Sequence[int], start: int) -> None:
        """Of a slot with a grammar: the input of its next row, from position `start` on."""
        assert self._matcher is not None
        num_skipped = max(0, self._num_prompt_tokens - start)
        if num_skipped < len(token_ids):
            self._matcher.tell(token_ids[num_skipped:], start + num_skipped - self._num_prompt_tokens)

    def take_mask(self, wait_s: float) -> int:
        """Before `apply`. Returns 0, or GRAMMAR_FAILED or NOT_READY, and then there is nothing to draw from."""
        if self._matcher is None:
            return 0
        mask = self._matcher.mask(wait_s)
        if isinstance(mask, int):
            return mask
        self._follows = self._to_device(mask)
        return 0

    def close(self) -> None:
        """The slot is closed."""
        if self._matcher is not None:
            self._matcher.close()

    def apply(self, logits: Tensor, position: int) -> Tensor:
        """What the token at `position` is drawn from. `logits`, float32 [vocab_size], stay as they are."""
        rules = self._rules
        if self._follows is not None:
            logits = torch.where(self._follows, logits, MASKED)
        if rules.allowed_token_ids:
            logits = _keep(logits, self._is_allowed)
        if rules.bad_words:
            logits = _keep(logits, self._is_free_of_bad_words(len(logits)))
        if position - self._num_prompt_tokens < rules.min_tokens:
            logits = _keep(logits, ~self._is_ending)
        if rules.logit_bias:
            logits = logits.index_add(0, self._bias_ids, self._biases)
        logits = self._penalised(logits)
        if self._temperature > 0.0:
            if rules.min_p > 0.0:
                logits = _keep(logits, logits >= logits.max() + self._temperature * math.log(rules.min_p))
            if rules.typical_p < 1.0:
                logits = _keep(logits, _is_typical(logits / self._temperature, rules.typical_p))
        return logits

    def push(self, token: Tensor) -> None:
        """Take the token that was drawn, int64 [1]."""
        self._counts.index_add_(0, token, self._one)
        if len(self._last_tokens):
            self._last_tokens = torch.cat((self._last_tokens[1:], token))

    def _is_free_of_bad_words(self, vocab_size: int) -> Tensor:
        """bool [vocab_size]"""
        has_begun = ((self._bad_starts == self._last_tokens) | (self._bad_starts == _ANY)).all(1)
        num_completed = torch.zeros(vocab_size, device=self._device)
        return num_completed.index_add_(0, self._bad_ends, has_begun.to(torch.float32)) == 0

    def _penalised(self, logits: Tensor) -> Tensor:
        rules = self._rules
        if rules.repetition_penalty != 1.0:
            penalty = rules.repetition_penalty
            is_there = self._is_in_prompt | (self._counts > 0)
            logits = torch.where(is_there, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        if rules.frequency_penalty:
            logits = logits - rules.frequency_penalty * self._counts
        if rules.presence_penalty:
            logits = logits - rules.presence_penalty * (self._counts > 0)
        return logits

    def _to_device(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


def take_masks(all_rules: Sequence[LogitRules | None]) -> list[int]:
    """Before the rules of a step are applied: for each 0, or why nothing can be drawn by them."""
    deadline = time.monotonic() + WAIT_S
    return [0 if one is None else one.take_mask(max(0.0, deadline - time.monotonic())) for one in all_rules]


def _among(token_ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """bool [vocab_size]"""
    found = np.zeros(vocab_size, dtype=bool)
    found[list(token_ids)] = True
    return found


def _keep(logits: Tensor, is_kept: Tensor) -> Tensor:
    """Mask the other tokens, unless no token would be left."""
    leaves_none = ~(is_kept & (logits > MASKED)).any()
    return torch.where(is_kept | leaves_none, logits, MASKED)


def _is_typical(scaled: Tensor, typical_p: float) -> Tensor:
    """bool [vocab_size]: the fewest tokens of nearly the expected surprise whose probabilities reach `typical_p`."""
    surprise = -scaled.log_softmax(-1)
    probabilities = (-surprise).exp()
    distance = (surprise - (probabilities * surprise).sum()).abs()
    order = distance.argsort(stable=True)
    ordered = probabilities[order].to(torch.float64)
    is_kept = ordered.cumsum(0) - ordered < typical_p
    return torch.zeros_like(is_kept).index_copy_(0, order, is_kept)
