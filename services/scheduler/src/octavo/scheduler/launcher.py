"""Turns the running sequences into the next step plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.common.messages.kv import BlockCopy, Transfer
from octavo.common.messages.step import OpenSlot, RowFlag, SlotRules, StepPlan, TableDelta
from octavo.common.messages.token_rules import NO_RULES
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.decode_rows import DecodeRows, LaunchedDecodes
from octavo.scheduler.policy import share_budget
from octavo.scheduler.queues import Slots
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.sharing_groups import SharingGroups

_RUNNING = SequenceState.RUNNING
_NO_FLAG = RowFlag.NONE
_SAMPLE = RowFlag.SAMPLE
_FAN_OUT = RowFlag.FAN_OUT
_FED_BY_LAST_SAMPLE = RowFlag.FED_BY_LAST_SAMPLE
_PROMPT_LOGPROBS = RowFlag.PROMPT_LOGPROBS


LaunchedRow = tuple[Sequence, int, int]
"""(sequence that had the slot at launch, position below which all is computed once the result is here, samples)"""


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way."""

    step_id: int
    rows: list[LaunchedRow]
    launched_at: float
    num_tokens: int
    num_prefill_tokens: int
    decodes: LaunchedDecodes | None = None
    """Rows before `rows`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What could run now. Decodes come first in the step's budget; a decode without a block sits out."""

    rows: list[tuple[Sequence, int]]
    """(sequence, positions to compute)"""
    num_starved: int
    """Decodes that sit out because no credit is left."""


def select_rows(running: Iterable[Sequence], account: BlockAccount, max_num_batched_tokens: int) -> Selection:
    """Choose rows, and spend the credits that decodes need, of sequences whose rows are planned one by one."""
    rows: list[tuple[Sequence, int]] = []
    prefills: list[tuple[Sequence, int]] = []
    num_starved = 0
    for sequence in running:
        if sequence.state is not _RUNNING:
            continue
        num_ahead = len(sequence.token_ids) + sequence.num_pending_samples
        num_left = num_ahead - sequence.num_launched_tokens
        if num_left > 1:
            prefills.append((sequence, num_left))
        elif num_ahead >= sequence.request.max_len or (
            sequence.is_host_fed and (num_left == 0 or sequence.num_pending_samples)
        ):
            continue
        elif account.has_block_for(sequence, sequence.num_launched_tokens):
            rows.append((sequence, 1))
        else:
            num_starved += 1
    if prefills:
        prefills.sort(key=lambda prefill: prefill[0].priority)
        rows += share_budget(prefills, max_num_batched_tokens - len(rows))
    return Selection(rows, num_starved)


def launch(
    step_id: int,
    rows: list[tuple[Sequence, int]],
    slots: Slots,
    copies: list[BlockCopy],
    sharing: SharingGroups,
    now: float,
    acknowledged_step: int = 0,
    transfers: Iterable[Transfer] = (),
    decodes: DecodeRows | None = None,
) -> tuple[StepPlan, LaunchedStep]:
    """The plan that copies, then computes `decodes` and `rows`, if there are any; moves the sequences' launch counters
    on."""
    plan = StepPlan(
        step_id=step_id,
        closed_slots=slots.drain_closed(),
        copies=copies,
        transfers=[*transfers],
        acknowledged_step=acknowledged_step,
    )
    for slot in plan.closed_slots:
        sharing.close(slot)
    launched_decodes = None
    if decodes is not None and len(decodes):
        for sequence in decodes.grown():
            _tell_worker(plan, sequence, sharing)
        launched_decodes = decodes.launch(plan)
    num_decodes = len(plan.slots)
    launched: list[LaunchedRow] = []
    all_flags, starts, input_ids = plan.flags, plan.starts, plan.token_ids
    for sequence, length in rows:
        if not sequence.is_open or sequence.num_sent_blocks < len(sequence.block_table):
            _tell_worker(plan, sequence, sharing)
        token_ids = sequence.token_ids
        start = sequence.num_launched_tokens
        end = start + length
        flags, num_samples = _NO_FLAG, 0
        if end == len(token_ids) + sequence.num_pending_samples:
            request = sequence.request
            flags, num_samples = (_SAMPLE, 1) if request.has_fanned_out else (_FAN_OUT, request.params.n)
            sequence.num_pending_samples += 1
        if start < sequence.request.num_prompt_tokens - 1 and sequence.request.awaits_prompt_logprobs:
            flags |= _PROMPT_LOGPROBS
        if end > len(token_ids):
            flags |= _FED_BY_LAST_SAMPLE
        elif length == 1:
            input_ids.append(token_ids[start])
        else:
            input_ids += token_ids[start:end]
        all_flags.append(flags)
        starts.append(start)
        sequence.num_launched_tokens = end
        sequence.num_steps_in_flight += 1
        launched.append((sequence, end, num_samples))
    plan.slots.extend([sequence.slot for sequence, _ in rows])
    plan.lengths.extend([length for _, length in rows])
    plan.groups.extend(sharing.of_rows(plan.slots))
    num_tokens = num_decodes + sum([length for _, length in rows])
    num_prefill_tokens = sum([length for _, length in rows if length > 1])
    return plan, LaunchedStep(step_id, launched, now, num_tokens, num_prefill_tokens, launched_decodes)


def without_targets(copies: list[BlockCopy], block_ids: list[int]) -> list[BlockCopy]:
    """The copies that are still wanted when these blocks are given up, before any of them was made.

    A copy of a block that is copied in vain itself reads that one's source.
    """
    kept: list[BlockCopy] = []
    in_vain: dict[int, BlockCopy] = {}
    for copy in copies:
        if (origin := in_vain.get(copy.source_id)) is not None:
            copy = replace(copy, source_id=origin.source_id, source_generation=origin.source_generation)
        if copy.target_id in block_ids:
            in_vain[copy.target_id] = copy
        else:
            kept.append(copy)
    return kept


def _slot_rules(sequence: Sequence) -> SlotRules | None:
    """No sample of the sequence is on its way: its tokens are all that it has."""
    request = sequence.request
    params = request.params
    if params.rules is None and not request.awaits_prompt_logprobs:
        return None
    num_prompt_tokens = request.num_prompt_tokens
    return SlotRules(
        params.rules or NO_RULES,
        tuple(sequence.token_ids[:num_prompt_tokens]),
        tuple(sequence.token_ids[num_prompt_tokens:]),
        tuple(sorted(request.ending_ids)),
        params.num_prompt_logprobs,
    )


def _tell_worker(plan: StepPlan, sequence: Sequence, sharing: SharingGroups) -> None:
    """Add what the worker does not know of the sequence's slot and table."""
    if not sequence.is_open:
        sequence.is_open = True
        sharing.open(sequence.slot, sequence.block_table)
        params, beams = sequence.request.params, sequence.request.beams
        plan.opened_slots.append(
            OpenSlot(
                slot=sequence.slot,
                sequence_id=sequence.sequence_id,
                seeds=sequence.seeds,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                num_logprobs=params.num_logprobs if beams is None else beams.num_logprobs,
                rules=_slot_rules(sequence),
                traceparent=sequence.request.traceparent,
            )
        )
    num_sent = sequence.num_sent_blocks
    if num_sent < len(sequence.block_table):
        plan.table_deltas.append(
            TableDelta(
                slot=sequence.slot,
                start_index=num_sent,
                block_ids=tuple(sequence.block_table[num_sent:]),
                generations=tuple(sequence.generations[num_sent:]),
            )
        )
        sequence.num_sent_blocks = len(sequence.block_table)
