"""Requests and sequences of the scheduler, made by hand."""

from __future__ import annotations

import itertools
from typing import Any

from octavo.common.messages.generation import SamplingParams
from octavo.scheduler.sequence import Request, Sequence
from octavo.scheduler.stopping import StopRules

_sequence_ids = itertools.count(1)


def make_sequence(num_prompt_tokens: int = 10, turn: float = 1, **params: Any) -> Sequence:
    """A waiting sequence that is the only one of its request; its prompt is 0, 1, 2, ..."""
    options = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **params})
    request = Request(1, int(turn), f"request-{turn}", options, num_prompt_tokens, salt=b"", turn=turn)
    request.has_fanned_out = options.n == 1
    StopRules(frozenset(), max_model_len=1000).apply_to(request)
    sequence = Sequence(next(_sequence_ids), request, 0, list(range(num_prompt_tokens)))
    request.leader = sequence
    request.live = dict.fromkeys(range(options.n)) | {0: sequence}
    return sequence


def make_running(
    num_prompt_tokens: int = 10, *, block_ids: tuple[int, ...], slot: int, num_computed: int = 0, **options: Any
) -> Sequence:
    """A sequence with a slot and a table; block 7 has generation 7."""
    sequence = make_sequence(num_prompt_tokens, **options)
    sequence.slot = slot
    sequence.take_table(block_ids, block_ids, num_computed)
    return sequence
