"""Beam search written plainly: whole token lists, the whole vocabulary, nothing shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

AllLogprobs = Callable[[Sequence[int]], dict[int, float]]
"""Tokens so far -> log-probability of every next token."""


def beam_answers(
    logprobs_after: AllLogprobs,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    width: int,
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    ending_ids: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """Outputs of the best `width` answers, best first."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    num_candidates = max(2, 1 + len(ending_ids)) * width
    for length in range(1, max_tokens + 1):
        candidates = []
        for total, output in live:
            for token, logprob in logprobs_after([*prompt, *output]).items():
                candidates.append((total + logprob, [*output, token]))
        candidates.sort(key=lambda candidate: -candidate[0])
        del candidates[num_candidates:]
        has_ended = [length == max_tokens or output[-1] in ending_ids for _, output in candidates]
        for (total, output), ends in list(zip(candidates, has_ended, strict=True))[:width]:
            if ends:
                ended.append((total / length**length_penalty, output))
        ended = sorted(ended, key=lambda answer: -answer[0])[:width]
        live = [candidate for candidate, ends in zip(candidates, has_ended, strict=True) if not ends][:width]
        if not live:
            break
        is_full = len(ended) == width
        if is_full and (early_stopping or live[0][0] / length**length_penalty <= ended[-1][0]):
            break
    return [output for _, output in ended]
