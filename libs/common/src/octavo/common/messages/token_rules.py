"""What changes the logits of a choice before a token is drawn from them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BIAS = 100.0
"""Either way."""
MAX_PENALTY = 2.0
"""Of presence and frequency, either way."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Applied in the order of the fields; temperature comes before `min_p`, `top_k` and `top_p` after `typical_p`.

    A rule that would leave no token is not applied.
    """

    grammar: str = ""
    """In llguidance's language: the output is a text of it, or the beginning of one. It is matched on the host, so no
    row of the slot is fed by its last sample. Empty for none."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these are drawn; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences, none empty, that the output does not contain: the last token of each is not drawn after the
    others. The prompt does not count."""
    min_tokens: int = 0
    """No ending id is drawn for so many output tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)"""
    repetition_penalty: float = 1.0
    """0.01 to 100. Logits of tokens that are in prompt or output are divided by it if positive, else multiplied."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely one's probability. 0 to 1; 0 keeps all."""
    typical_p: float = 1.0
    """Of the tokens whose surprise is nearest to the expected one, keep the fewest whose probabilities reach this sum.
    In (0, 1]; 1 keeps all."""

    def what_is_wrong(self, vocab_size: int) -> str:
        """Empty if a worker can apply them, else the first that it cannot."""
        ids = [*self.allowed_token_ids, *(token_id for token_id, _ in self.logit_bias)]
        ids += [token_id for word in self.bad_words for token_id in word]
        checks = (
            (not ids or (min(ids) >= 0 and max(ids) < vocab_size), "a token id is not in the vocabulary"),
            (all(self.bad_words), "a bad word has no tokens"),
            (self.min_tokens >= 0, "min_tokens is below 0"),
            (all(-MAX_BIAS <= bias <= MAX_BIAS for _, bias in self.logit_bias), "a logit_bias is out of range"),
            (len({token_id for token_id, _ in self.logit_bias}) == len(self.logit_bias), "a token has two biases"),
            (
                MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
                "repetition_penalty is out of range",
            ),
            (-MAX_PENALTY <= self.frequency_penalty <= MAX_PENALTY, "frequency_penalty is out of range"),
            (-MAX_PENALTY <= self.presence_penalty <= MAX_PENALTY, "presence_penalty is out of range"),
            (0 <= self.min_p <= 1, "min_p is out of range"),
            (0 < self.typical_p <= 1, "typical_p is out of range"),
        )
        return next((problem for is_right, problem in checks if not is_right), "")


NO_RULES = TokenRules()
