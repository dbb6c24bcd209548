"""When a sequence ends by its tokens. Stop strings are text, and matched in the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.common.messages.generation import FinishReason
from octavo.scheduler.beam_search import BeamGroup
from octavo.scheduler.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence has ended."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends sequences of one model."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def ending(self, sequence: Sequence) -> Ending | None:
        """Look at the last token. `stop_token_ids` hold also with `ignore_eos`, which covers the model's own ids."""
        params = sequence.request.params
        last = sequence.token_ids[-1]
        if last in self.eos_token_ids and not params.ignore_eos:
            return Ending(FinishReason.STOP)
        if last in params.stop_token_ids:
            return Ending(FinishReason.STOP, last)
        if self.is_at_length(sequence, sequence.num_output_tokens):
            return Ending(FinishReason.LENGTH)
        return None

    def beam_group(self, request: Request) -> BeamGroup:
        """A search with the same ends."""
        params = request.params
        own_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        return BeamGroup(
            width=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            ending_token_ids=own_ids.union(params.stop_token_ids),
            max_output_tokens=min(params.max_tokens, self.max_model_len - request.num_prompt_tokens),
        )

    def is_at_length(self, sequence: Sequence, num_output_tokens: int) -> bool:
        """Whether no token may follow after `num_output_tokens`."""
        request = sequence.request
        return (
            num_output_tokens >= request.params.max_tokens
            or request.num_prompt_tokens + num_output_tokens >= self.max_model_len
        )
