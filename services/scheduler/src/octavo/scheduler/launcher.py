"""Turns the running sequences into the next step plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.common.messages.kv import BlockCopy
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.policy import share_budget
from octavo.scheduler.queues import Slots
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.stopping import StopRules

_NO_FLAG = int(RowFlag.NONE)
_SAMPLE = int(RowFlag.SAMPLE)
_FAN_OUT = int(RowFlag.FAN_OUT)
_FED_BY_LAST_SAMPLE = int(RowFlag.FED_BY_LAST_SAMPLE)


@dataclass(frozen=True, slots=True)
class LaunchedRow:
    """One row of a step on its way, by the sequence that had the slot at launch."""

    sequence: Sequence
    end: int
    """Positions below it are computed once the result is here."""
    num_samples: int


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step on its way."""

    step_id: int
    rows: list[LaunchedRow]
    launched_at: float


@dataclass(frozen=True, slots=True)
class Selection:
    """What could run now. Decodes come first in the step's budget; a decode without a block sits out."""

    rows: list[tuple[Sequence, int]]
    """(sequence, positions to compute)"""
    num_starved: int
    """Decodes that sit out because no credit is left."""


def select_rows(
    running: Iterable[Sequence], account: BlockAccount, rules: StopRules, max_num_batched_tokens: int
) -> Selection:
    """Choose rows, and spend the credits that decodes need."""
    rows: list[tuple[Sequence, int]] = []
    prefills: list[tuple[Sequence, int]] = []
    num_starved = 0
    for sequence in running:
        if sequence.state is not SequenceState.RUNNING:
            continue
        num_left = sequence.num_tokens_to_launch
        if num_left > 1:
            prefills.append((sequence, num_left))
        elif sequence.num_pending_samples and rules.is_at_length(
            sequence, sequence.num_output_tokens + sequence.num_pending_samples
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
    step_id: int, rows: list[tuple[Sequence, int]], slots: Slots, copies: list[BlockCopy], now: float
) -> tuple[StepPlan, LaunchedStep]:
    """The plan that makes `copies`, then computes `rows`; moves the sequences' launch counters on."""
    plan = StepPlan(step_id=step_id, closed_slots=slots.drain_closed(), copies=copies)
    launched = [_launch_row(plan, sequence, length) for sequence, length in rows]
    return plan, LaunchedStep(step_id, launched, now)


def _launch_row(plan: StepPlan, sequence: Sequence, length: int) -> LaunchedRow:
    _tell_worker(plan, sequence)
    start = sequence.num_launched_tokens
    end = start + length
    flags, num_samples = _NO_FLAG, 0
    if end == sequence.num_tokens_ahead:
        request = sequence.request
        fans_out = request.params.n > 1 and not request.has_fanned_out
        flags, num_samples = (_FAN_OUT, request.params.n) if fans_out else (_SAMPLE, 1)
        sequence.num_pending_samples += 1
    if end > len(sequence.token_ids):
        flags |= _FED_BY_LAST_SAMPLE
    else:
        plan.token_ids.extend(sequence.token_ids[start:end])
    plan.slots.append(sequence.slot)
    plan.starts.append(start)
    plan.lengths.append(length)
    plan.flags.append(flags)
    sequence.num_launched_tokens = end
    sequence.num_steps_in_flight += 1
    return LaunchedRow(sequence, end, num_samples)


def _tell_worker(plan: StepPlan, sequence: Sequence) -> None:
    """Add what the worker does not know of the sequence's slot and table."""
    if not sequence.is_open:
        sequence.is_open = True
        params = sequence.request.params
        plan.opened_slots.append(
            OpenSlot(
                slot=sequence.slot,
                sequence_id=sequence.sequence_id,
                seeds=sequence.seeds,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                num_logprobs=params.num_logprobs,
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
