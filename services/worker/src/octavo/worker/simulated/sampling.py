"""What a simulated worker samples: ordinary tokens, drawn from (seed, position) alone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo.common.messages.generation import PromptLogprobs, TokenLogprobs
from octavo.common.messages.step import GRAMMAR_FAILED, OpenSlot, RowFlag, StepPlan
from octavo.worker.models.model_json import read_json
from octavo.worker.prompt_parts import prompt_parts
from octavo.worker.runner import StepSamples
from octavo.worker.uniforms import uniforms

_WORD = re.compile("[Ġ▁]?[A-Za-z]{2,}")
"""Vocabulary entries that are words; the first character stands for a space."""

TokenArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def plain_token_ids(folder: Path | None, vocab_size: int, eos_token_ids: Sequence[int]) -> TokenArray:
    """The tokens to draw from: the words of the folder's tokenizer, or all but the ends of sequence.

    Raises ModelLoadError if tokenizer.json cannot be read.
    """
    words: list[int] = []
    if folder is not None and (folder / "tokenizer.json").exists():
        model = read_json(folder / "tokenizer.json").get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, dict):
            words = [token_id for text, token_id in vocabulary.items() if _WORD.fullmatch(text)]
    ends = set(eos_token_ids)
    return np.array(sorted(one for one in words or range(vocab_size) if one not in ends and one < vocab_size))


class Sampling:
    """Owns the seeds of the open slots. At temperature 0 the seed counts as 0."""

    def __init__(self, token_ids: TokenArray, vocab_size: int, max_num_seqs: int) -> None:
        self._token_ids = token_ids
        self._logprob = -math.log(vocab_size)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._telling: set[int] = set()
        """Slots that tell log-probabilities."""
        self._with_grammar: set[int] = set()

    def apply(self, plan: StepPlan) -> None:
        """Take note of the slots that the plan opens."""
        for opened in plan.opened_slots:
            self._seeds[opened.slot] = opened.seeds[0] if opened.temperature > 0 else 0
            _note(self._telling, opened.slot, opened.num_logprobs is not None)
            _note(self._with_grammar, opened.slot, opened.rules is not None and bool(opened.rules.rules.grammar))

    def draw(self, plan: StepPlan, slots: Sequence[OpenSlot | None]) -> StepSamples:
        """What the plan's rows sample and tell."""
        flags = np.array(plan.flags, dtype=np.int64)
        rows = np.flatnonzero(flags & (RowFlag.SAMPLE | RowFlag.FAN_OUT))
        drawn_slots = np.array(plan.slots, dtype=np.int64)[rows]
        positions = (np.array(plan.starts, dtype=np.int64) + np.array(plan.lengths, dtype=np.int64))[rows]
        seeds = self._seeds[drawn_slots]
        if (flags & RowFlag.FAN_OUT).any():
            of_rows = [self._seeds_of(slots[plan.slots[row]], plan.flags[row]) for row in rows]
            counts = [len(one) for one in of_rows]
            drawn_slots, positions = np.repeat(drawn_slots, counts), np.repeat(positions, counts)
            seeds = np.array([seed for one in of_rows for seed in one], dtype=np.uint64)
        places = (uniforms(seeds, positions.astype(np.uint64)) * len(self._token_ids)).astype(np.int64)
        token_ids: list[int] = self._token_ids[places].tolist()
        logprobs: list[TokenLogprobs | None] = []
        if self._with_grammar or self._telling:
            of_draws = drawn_slots.tolist()
            token_ids = [
                GRAMMAR_FAILED if slot in self._with_grammar else token_id
                for slot, token_id in zip(of_draws, token_ids, strict=True)
            ]
            logprobs = [self._logprobs(slots[slot], one) for slot, one in zip(of_draws, token_ids, strict=True)]
        return StepSamples(
            token_ids, logprobs if any(logprobs) else [], prompt_logprobs=self._prompt_logprobs(plan, flags, slots)
        )

    def _seeds_of(self, opened: OpenSlot | None, flags: int) -> tuple[int, ...]:
        assert opened is not None
        seeds = opened.seeds if flags & RowFlag.FAN_OUT else opened.seeds[:1]
        return seeds if opened.temperature > 0 else (0,) * len(seeds)

    def _logprobs(self, opened: OpenSlot | None, token_id: int) -> TokenLogprobs | None:
        """All tokens are as likely as one another; the sampled one is named first."""
        if opened is None or opened.num_logprobs is None or token_id < 0:
            return None
        best = [token_id, *(one for one in self._token_ids[: opened.num_logprobs].tolist() if one != token_id)]
        best = best[: opened.num_logprobs]
        return TokenLogprobs(self._logprob, tuple(best), (self._logprob,) * len(best))

    def _prompt_logprobs(
        self, plan: StepPlan, flags: np.ndarray, slots: Sequence[OpenSlot | None]
    ) -> list[tuple[int, PromptLogprobs]]:
        if not (flags & RowFlag.PROMPT_LOGPROBS).any():
            return []
        found = []
        for part in prompt_parts(plan, slots):
            count, num_top = len(part.token_ids), min(part.num_top, len(self._token_ids))
            top_ids = self._token_ids[:num_top].tolist() * count
            logprobs = [self._logprob] * count
            told = PromptLogprobs(part.start, logprobs, [1] * count, num_top, top_ids, [self._logprob] * len(top_ids))
            found.append((part.row, told))
        return found


def _note(slots: set[int], slot: int, belongs: bool) -> None:
    if belongs:
        slots.add(slot)
    else:
        slots.discard(slot)
