"""Owns which sequence is open in each slot of a worker, and the tables of its blocks. Knows no device."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.common.messages.step import OpenSlot, StepPlan
from octavo.worker.block_tables import BlockTables


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a plan may not exceed."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)


class Slots:
    """The slots as plans have left them. Plans must have passed `check_plan` before `apply_slots`."""

    def __init__(self, limits: StepLimits, tables: BlockTables) -> None:
        self.limits = limits
        self.tables = tables
        self.slots: list[OpenSlot | None] = [None] * limits.max_num_seqs
        self.has_sampled = [False] * limits.max_num_seqs
        self.num_open = 0
        """Slots that hold a sequence."""

    @property
    def follows_grammars(self) -> bool:
        """Whether slots may be opened with a grammar."""
        return True

    def close_all(self) -> None:
        """Close all slots. What blocks hold stays."""
        self.slots = [None] * len(self.slots)
        self.has_sampled = [False] * len(self.slots)
        self.num_open = 0
        self.tables.empty()

    def apply_slots(self, plan: StepPlan) -> None:
        """Closes and opens only, and the generations of copies."""
        for slot in plan.closed_slots:
            self.slots[slot] = None
            self.tables.clear(slot)
        for opened in plan.opened_slots:
            self.slots[opened.slot] = opened
            self.has_sampled[opened.slot] = False
        self.num_open += len(plan.opened_slots) - len(plan.closed_slots)
        self.tables.note_copies(plan.copies)
