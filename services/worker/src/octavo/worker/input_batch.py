"""Owns the slots: which sequence is open in each, its sampling state, and the token it sampled last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.common.messages.step import OpenSlot, RowFlag, SlotRules, StepPlan
from octavo.worker.attention import AttentionMetadata
from octavo.worker.device_tables import DeviceTables
from octavo.worker.grammars import Grammars
from octavo.worker.logit_rules import LogitRules
from octavo.worker.sampler import Draw
from octavo.worker.shared_runs import shared_runs
from octavo.worker.slots import Slots, StepLimits


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as tensors, and what it samples."""

    token_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    attention: AttentionMetadata
    sampled_tokens: Tensor  # int64 [num_draws] |-> the step's token whose logits are drawn from
    sampled_slots: Tensor  # int64 [num_draws]
    draws: list[Draw]


class InputBatch(Slots):
    """The slots, with what their rows are computed and sampled from."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        tables = DeviceTables(limits.max_num_seqs, limits.max_blocks_per_seq, limits.num_blocks, device)
        super().__init__(limits, tables)
        self.tables: DeviceTables = tables
        self.rules: dict[int, LogitRules] = {}
        """Of the open slots that have any."""
        self.grammars: Grammars | None = None
        """None: slots with a grammar are refused."""
        self._last_sampled = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)

    @property
    def follows_grammars(self) -> bool:
        """See Slots."""
        return self.grammars is not None

    def close_all(self) -> None:
        """See Slots."""
        super().close_all()
        for slot in list(self.rules):
            self._drop_rules(slot)

    def apply(self, plan: StepPlan) -> None:
        """Closes, opens and table deltas, in this order; of copies only the generations."""
        self.apply_slots(plan)
        self.tables.append(plan.table_deltas)

    def apply_slots(self, plan: StepPlan) -> None:
        """See Slots."""
        super().apply_slots(plan)
        for slot in plan.closed_slots:
            self._drop_rules(slot)
        for opened in plan.opened_slots:
            if opened.rules is not None:
                self.rules[opened.slot] = self._new_rules(opened, opened.rules)
        if any(rules.has_grammar for rules in self.rules.values()):
            self._tell_grammars(plan)

    def _new_rules(self, opened: OpenSlot, rules: SlotRules) -> LogitRules:
        matcher = None
        if rules.rules.grammar:
            assert self.grammars is not None, "check_plan lets no grammar in without"
            matcher = self.grammars.begin(rules.rules.grammar, rules.output_token_ids)
        return LogitRules(rules, opened.temperature, self.limits.vocab_size, self._last_sampled.device, matcher)

    def _drop_rules(self, slot: int) -> None:
        if (rules := self.rules.pop(slot, None)) is not None:
            rules.close()

    def _tell_grammars(self, plan: StepPlan) -> None:
        """Early in the step, so that masks are made while the model runs."""
        end = 0
        for slot, start, length, flags in zip(plan.slots, plan.starts, plan.lengths, plan.flags, strict=True):
            begin, end = end, end + (0 if flags & RowFlag.FED_BY_LAST_SAMPLE else length)
            rules = self.rules.get(slot)
            if rules is not None and rules.has_grammar:
                rules.tell(plan.token_ids[begin:end], start)

    def inputs(self, plan: StepPlan) -> StepInputs:
        """The plan's rows as tensors. At least one row."""
        slots, starts = np.array(plan.slots), np.array(plan.starts)
        lengths = np.array(plan.lengths)
        ends = np.cumsum(lengths)
        firsts = ends - lengths
        row_of_token = np.repeat(np.arange(len(slots)), lengths)
        positions = np.arange(len(row_of_token)) + (starts - firsts)[row_of_token]

        block_size = self.limits.block_size
        block_ids = self.tables.on_host[slots[row_of_token], positions // block_size].astype(np.int64)
        seq_lens = starts + lengths
        device = self._last_sampled.device
        slots_on_device = torch.from_numpy(slots).to(device)
        sampling = [row for row, flags in enumerate(plan.flags) if flags & (RowFlag.SAMPLE | RowFlag.FAN_OUT)]
        return StepInputs(
            token_ids=self._token_ids(plan, slots, firsts, len(positions)),
            positions=torch.from_numpy(positions).to(device),
            attention=AttentionMetadata(
                slot_mapping=torch.from_numpy(block_ids * block_size + positions % block_size).to(device),
                seq_lens=torch.from_numpy(seq_lens.astype(np.int32)).to(device),
                block_tables=self.tables.of_rows(slots_on_device, int(-(-seq_lens.max() // block_size))),
                query_lens_on_host=lengths,
                seq_lens_on_host=seq_lens,
                shared_runs=shared_runs(plan, self.tables, block_size) if plan.groups else [],
            ),
            sampled_tokens=torch.from_numpy(ends[sampling] - 1).to(device),
            sampled_slots=torch.from_numpy(slots[sampling]).to(device),
            draws=[self._draw(plan, row) for row in sampling],
        )

    def _token_ids(self, plan: StepPlan, slots: np.ndarray, firsts: np.ndarray, num_tokens: int) -> Tensor:
        """The tokens sent, and those that the slots sampled last in the places of rows that are fed by them."""
        device = self._last_sampled.device
        if not any(flags & RowFlag.FED_BY_LAST_SAMPLE for flags in plan.flags):
            return torch.tensor(plan.token_ids).to(device)
        fed = (np.array(plan.flags) & RowFlag.FED_BY_LAST_SAMPLE) != 0
        fed_slots = torch.from_numpy(slots[fed]).to(device)
        if fed.all():
            return self._last_sampled.index_select(0, fed_slots)
        is_sent = np.ones(num_tokens, dtype=bool)
        is_sent[firsts[fed]] = False
        token_ids = np.zeros(num_tokens, dtype=np.int64)
        token_ids[is_sent] = plan.token_ids
        fed_tokens = torch.from_numpy(firsts[fed]).to(device)
        return (
            torch.from_numpy(token_ids)
            .to(device)
            .index_copy_(0, fed_tokens, self._last_sampled.index_select(0, fed_slots))
        )

    def _draw(self, plan: StepPlan, row: int) -> Draw:
        opened = self.slots[plan.slots[row]]
        assert opened is not None
        return Draw(
            seeds=opened.seeds if plan.flags[row] & RowFlag.FAN_OUT else opened.seeds[:1],
            position=plan.starts[row] + plan.lengths[row],
            temperature=opened.temperature,
            top_p=opened.top_p,
            top_k=opened.top_k,
            num_logprobs=opened.num_logprobs,
            rules=self.rules.get(opened.slot),
        )

    def keep_sampled(self, inputs: StepInputs, token_ids: Tensor) -> None:
        """Feed the slots' next rows from `token_ids`, int64 [num_draws], without asking the host."""
        self._last_sampled.index_copy_(0, inputs.sampled_slots, token_ids.clamp_min(0))
        for draw, slot in enumerate(inputs.sampled_slots.tolist()):
            self.has_sampled[slot] = True
            if (rules := self.rules.get(slot)) is not None and token_ids[draw] >= 0:
                rules.push(token_ids[draw : draw + 1])
