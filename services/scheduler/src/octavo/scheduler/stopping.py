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

    def apply_to(self, request: Request) -> None:
        """Write what ends the request's choices into it, where each step looks.

        `stop_token_ids` hold also with `ignore_eos`, which covers the model's own ids.
        """
        params = request.params
        own_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        request.ending_ids = own_ids | frozenset(params.stop_token_ids)
        request.max_len = min(request.num_prompt_tokens + params.max_tokens, self.max_model_len)

    def ending(self, sequence: Sequence) -> Ending | None:
        """Look at the last token."""
        request = sequence.request
        last = sequence.token_ids[-1]
        if last in request.ending_ids:
            is_own = last in self.eos_token_ids and not request.params.ignore_eos
            return Ending(FinishReason.STOP, None if is_own else last)
        return Ending(FinishReason.LENGTH) if len(sequence.token_ids) >= request.max_len else None

    def beam_group(self, request: Request) -> BeamGroup:
        """A search with the same ends; `apply_to` has been called."""
        params = request.params
        return BeamGroup(
            width=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            ending_token_ids=request.ending_ids,
            max_output_tokens=request.max_len - request.num_prompt_tokens,
        )
