"""Checks a plan whole before any of it runs, so that no index reaches a tensor unchecked."""

from __future__ import annotations

import math

from octavo.common.errors import ProtocolError
from octavo.common.messages.step import OpenSlot, RowFlag, SlotRules, StepPlan
from octavo.worker.prompt_parts import check_flags
from octavo.worker.slots import Slots, StepLimits

KNOWN_FLAGS = RowFlag.SAMPLE | RowFlag.FAN_OUT | RowFlag.FED_BY_LAST_SAMPLE | RowFlag.PROMPT_LOGPROBS


def check_plan(plan: StepPlan, batch: Slots) -> None:
    """Raise ProtocolError, or a subclass, if the plan cannot be applied to the batch as it is. Changes nothing."""
    limits = batch.limits
    closed = set(plan.closed_slots)
    if len(closed) < len(plan.closed_slots):
        raise ProtocolError("a slot is closed twice")
    for slot in plan.closed_slots:
        _check_slot(slot, limits)
        if batch.slots[slot] is None:
            raise ProtocolError(f"slot {slot} is closed, but not open")
    opened: set[int] = set()
    for opening in plan.opened_slots:
        _check_opening(opening, limits)
        if opening.rules is not None and opening.rules.rules.grammar and not batch.follows_grammars:
            raise ProtocolError(f"slot {opening.slot} opens with a grammar, and this worker follows none")
        if opening.slot in opened or (batch.slots[opening.slot] is not None and opening.slot not in closed):
            raise ProtocolError(f"slot {opening.slot} is opened, but not free")
        opened.add(opening.slot)

    def is_open(slot: int) -> bool:
        return slot in opened or (batch.slots[slot] is not None and slot not in closed)

    for delta in plan.table_deltas:
        _check_slot(delta.slot, limits)
        if not is_open(delta.slot):
            raise ProtocolError(f"a delta names slot {delta.slot}, which is not open")
    table_lengths = batch.tables.check(plan.closed_slots, plan.table_deltas)
    batch.tables.check_copies(plan.copies, plan.closed_slots, plan.table_deltas)
    _check_rows(plan, limits)
    for slot, start, length, flags in zip(plan.slots, plan.starts, plan.lengths, plan.flags, strict=True):
        if slot not in opened and (batch.slots[slot] is None or slot in closed):
            raise ProtocolError(f"a row names slot {slot}, which is not open")
        num_positions = table_lengths.get(slot, batch.tables.num_entries[slot]) * limits.block_size
        if start + length > min(num_positions, limits.max_model_len):
            raise ProtocolError(
                f"slot {slot} computes up to position {start + length - 1}, its table holds {num_positions}"
            )
        if flags & RowFlag.FED_BY_LAST_SAMPLE:
            if slot in opened or not batch.has_sampled[slot]:
                raise ProtocolError(f"slot {slot} is fed by its last sample, but has none")
            if _has_grammar(batch.slots[slot]):
                raise ProtocolError(f"slot {slot} has a grammar, and is fed by its last sample")
    if any(flags & RowFlag.PROMPT_LOGPROBS for flags in plan.flags):
        openings = {opening.slot: opening for opening in plan.opened_slots}
        if problem := check_flags(plan, {slot: openings.get(slot) or batch.slots[slot] for slot in plan.slots}):
            raise ProtocolError(problem)


def _has_grammar(opened: OpenSlot | None) -> bool:
    return opened is not None and opened.rules is not None and bool(opened.rules.rules.grammar)


def _check_slot(slot: int, limits: StepLimits) -> None:
    if not 0 <= slot < limits.max_num_seqs:
        raise ProtocolError(f"slot {slot} is not one of {limits.max_num_seqs}")


def _check_opening(opening: OpenSlot, limits: StepLimits) -> None:
    _check_slot(opening.slot, limits)
    if not opening.seeds or not all(0 <= seed < 2**64 for seed in opening.seeds):
        raise ProtocolError(f"slot {opening.slot} opens without a seed, or with one that is no uint64")
    if not (math.isfinite(opening.temperature) and opening.temperature >= 0):
        raise ProtocolError(f"slot {opening.slot} opens with temperature {opening.temperature}")
    if not 0 < opening.top_p <= 1:
        raise ProtocolError(f"slot {opening.slot} opens with top_p {opening.top_p}")
    if opening.top_k < 0:
        raise ProtocolError(f"slot {opening.slot} opens with top_k {opening.top_k}")
    if opening.num_logprobs is not None and not 0 <= opening.num_logprobs <= limits.vocab_size:
        raise ProtocolError(f"slot {opening.slot} asks for {opening.num_logprobs} log-probabilities")
    if opening.rules is not None:
        _check_rules(opening.slot, opening.rules, limits)


def _check_rules(slot: int, rules: SlotRules, limits: StepLimits) -> None:
    if problem := rules.rules.what_is_wrong(limits.vocab_size):
        raise ProtocolError(f"slot {slot} opens with rules that cannot be: {problem}")
    token_ids = (*rules.prompt_token_ids, *rules.output_token_ids, *rules.ending_token_ids)
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        raise ProtocolError(f"slot {slot} opens with rules for a token id that is not one of {limits.vocab_size}")


def _check_rows(plan: StepPlan, limits: StepLimits) -> None:
    """The rows by themselves: sizes and ranges."""
    num_rows = len(plan.slots)
    if not num_rows == len(plan.starts) == len(plan.lengths) == len(plan.flags):
        raise ProtocolError("the row arrays differ in length")
    if len(set(plan.slots)) < num_rows:
        raise ProtocolError("a slot has two rows")
    num_sent = 0
    for slot, start, length, flags in zip(plan.slots, plan.starts, plan.lengths, plan.flags, strict=True):
        _check_slot(slot, limits)
        if start < 0 or length < 1:
            raise ProtocolError(f"a row of slot {slot} has start {start} and length {length}")
        if flags & ~KNOWN_FLAGS:
            raise ProtocolError(f"a row of slot {slot} has unknown flags {flags:#x}")
        if not flags & RowFlag.FED_BY_LAST_SAMPLE:
            num_sent += length
        elif length != 1:
            raise ProtocolError(f"slot {slot} is fed by its last sample, but its row has length {length}")
    if sum(plan.lengths) > limits.max_num_batched_tokens:
        raise ProtocolError(f"{sum(plan.lengths)} tokens in one step, at most {limits.max_num_batched_tokens}")
    if num_sent != len(plan.token_ids):
        raise ProtocolError(f"the rows take {num_sent} tokens, the plan brings {len(plan.token_ids)}")
    if plan.token_ids and not (min(plan.token_ids) >= 0 and max(plan.token_ids) < limits.vocab_size):
        raise ProtocolError(f"a token id is not one of {limits.vocab_size}")
