"""Chooses tokens from logits. Each row's choice is what it would be if the row were alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.common.messages.generation import TokenLogprobs
from octavo.common.messages.step import NOT_FINITE
from octavo.worker.logit_rules import LogitRules, take_masks
from octavo.worker.uniforms import uniforms

NUM_LIKELY = 1024
"""Tokens that are sorted for top_p at first; the whole vocabulary is only if their probabilities do not reach it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How to choose from one row of logits: one token per seed."""

    seeds: tuple[int, ...]
    position: int
    """Index of the new token in its sequence."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    num_logprobs: int | None = None
    rules: LogitRules | None = None
    """Change the logits first."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen tokens, draw by draw, seed by seed."""

    token_ids: Tensor  # int64 [num_tokens]; NOT_FINITE and the like where nothing could be drawn
    first_of_draw: Tensor  # int64 [num_draws], the token of each draw's first seed
    logprobs: list[TokenLogprobs | None]
    """One for each token, or empty if no draw asked for any."""


def sample(logits: Tensor, draws: list[Draw]) -> Sampled:
    """`logits` is float32 [num_draws, vocab_size]."""
    is_finite = logits.sum(-1).isfinite()
    codes = take_masks([draw.rules for draw in draws])
    ruled = _ruled(logits, draws)
    greedy = ruled.argmax(-1)
    if all(draw.is_greedy and len(draw.seeds) == 1 for draw in draws):
        token_ids = first_of_draw = greedy.masked_fill_(~is_finite, NOT_FINITE)
    else:
        chosen = [_choose(ruled[row], greedy[row], draw) for row, draw in enumerate(draws)]
        counts = torch.tensor([len(draw.seeds) for draw in draws])
        ends = counts.cumsum(0)
        is_finite_token = is_finite.repeat_interleave(counts.to(logits.device))
        token_ids = torch.cat(chosen).masked_fill_(~is_finite_token, NOT_FINITE)
        first_of_draw = token_ids[(ends - counts).to(logits.device)]
    if any(codes):
        firsts = [sum(len(draw.seeds) for draw in draws[:row]) for row in range(len(draws))]
        for code, first, draw in zip(codes, firsts, draws, strict=True):
            if code:
                token_ids[first : first + len(draw.seeds)] = code
        first_of_draw = token_ids[torch.tensor(firsts, device=token_ids.device)]
    return Sampled(token_ids, first_of_draw, _logprobs(logits, draws, token_ids))


def _ruled(logits: Tensor, draws: list[Draw]) -> Tensor:
    """The logits as the rules of each draw change them."""
    if all(draw.rules is None for draw in draws):
        return logits
    rows = zip(logits, draws, strict=True)
    return torch.stack([row if draw.rules is None else draw.rules.apply(row, draw.position) for row, draw in rows])


def _choose(logits: Tensor, greedy: Tensor, draw: Draw) -> Tensor:
    """int64 [num_seeds] from one row: the smallest token whose cumulative probability exceeds the seed's number."""
    if draw.is_greedy:
        return greedy.expand(len(draw.seeds))
    scaled = (logits - logits[greedy]) / draw.temperature
    numbers = torch.from_numpy(uniforms(draw.seeds, draw.position)).to(logits.device)
    if draw.top_k == 0 and draw.top_p == 1.0:
        return _invert(scaled.exp().to(torch.float64), numbers)
    weights, token_ids = _filter(scaled, draw.top_k, draw.top_p)
    return token_ids[_invert(weights, numbers)]


def _filter(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Weights, float64, and ids of the tokens that may be drawn, most likely first.

    `top_k` keeps that many tokens; `top_p` then keeps the fewest whose share of what is left reaches it.
    """
    vocab_size = len(scaled)
    num_sorted = min(top_k or NUM_LIKELY, vocab_size)
    values, token_ids = scaled.topk(num_sorted)
    weights = values.to(torch.float64).exp_()
    if top_p == 1.0:
        return weights, token_ids
    total = weights.sum() if top_k else scaled.to(torch.float64).exp_().sum()
    if not top_k and num_sorted < vocab_size and bool(weights.sum() < top_p * total):
        values, token_ids = scaled.sort(descending=True, stable=True)
        weights = values.to(torch.float64).exp_()
    before = weights.cumsum(0) - weights
    return weights.masked_fill_(before >= top_p * total, 0.0), token_ids


def _invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """Indexes drawn with probability proportional to `weights` [num_tokens], by `numbers` in [0, 1)."""
    cumulative = weights.cumsum(0)
    found = torch.searchsorted(cumulative, numbers * cumulative[-1], right=True)
    # Rounding may put a number at the very end: the last index of weight above 0 is where the sum is first reached.
    last = torch.searchsorted(cumulative, cumulative[-1:])
    return torch.minimum(found, last).clamp_max_(len(weights) - 1)


def _logprobs(logits: Tensor, draws: list[Draw], token_ids: Tensor) -> list[TokenLogprobs | None]:
    """From the raw logits, before rules, temperature and filters."""
    if all(draw.num_logprobs is None for draw in draws):
        return []
    chosen = token_ids.tolist()
    found: list[TokenLogprobs | None] = []
    for row, draw in enumerate(draws):
        tokens = chosen[len(found) : len(found) + len(draw.seeds)]
        if draw.num_logprobs is None or tokens[0] < 0:
            found += [None] * len(tokens)
            continue
        logprobs = logits[row].log_softmax(-1)
        best = logprobs.topk(draw.num_logprobs)
        best_ids, best_logprobs = tuple(best.indices.tolist()), tuple(best.values.tolist())
        found += [TokenLogprobs(float(logprobs[token]), best_ids, best_logprobs) for token in tokens]
    return found
