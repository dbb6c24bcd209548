"""Chooses the best of several choices by their mean log-probability per token."""

from __future__ import annotations

from octavo.common.messages.generation import TokenLogprobs


class ChoiceRanking:
    """Log-probabilities of all choices of a request. Choice `i * n + j` is the j-th of prompt i."""

    def __init__(self, num_prompts: int, n: int) -> None:
        self._n = n
        self._sums = [0.0] * (num_prompts * n)
        self._num_tokens = [0] * (num_prompts * n)

    def add(self, choice: int, logprobs: TokenLogprobs | None) -> None:
        """Count a token that belongs to the choice's output."""
        if logprobs is not None:
            self._sums[choice] += logprobs.sampled
            self._num_tokens[choice] += 1

    def best(self, num_returned: int) -> list[int]:
        """The best choices of each prompt, best first, prompt by prompt."""
        means = [total / max(count, 1) for total, count in zip(self._sums, self._num_tokens, strict=True)]
        found: list[int] = []
        for first in range(0, len(means), self._n):
            ranked = sorted(range(first, first + self._n), key=lambda choice: -means[choice])
            found += ranked[:num_returned]
        return found
