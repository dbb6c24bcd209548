"""Rows with rules are drawn again, by themselves; all other results of the step stay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.common.messages.step import OpenSlot, SlotRules, StepPlan
from octavo.common.messages.token_rules import TokenRules
from octavo.worker.gpu_batch import GpuBatch
from octavo.worker.gpu_ruled_draws import DrawnRow, redraw
from octavo.worker.slots import StepLimits
from octavo.worker.step_buffer import Int32Array

VOCAB_SIZE = 24
LIMITS = StepLimits(
    num_blocks=8, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, vocab_size=VOCAB_SIZE
)


class PlainBuffer:
    """Takes columns to the device without a ring of pinned memory."""

    def __init__(self, device: str) -> None:
        self._device = device

    def send(self, columns: Sequence[Int32Array]) -> list[Tensor]:
        return [torch.from_numpy(column).to(self._device) for column in columns]


def batch_of(device: str, *openings: OpenSlot) -> GpuBatch:
    batch = GpuBatch(LIMITS, 1, 16, 16, False, torch.device(device))
    batch.apply_on_host(StepPlan(step_id=1, opened_slots=list(openings)))
    return batch


def row(batch: GpuBatch, slot: int, logits_row: int, first_place: int, num_seeds: int = 1) -> DrawnRow:
    opened = batch.slots[slot]
    assert opened is not None
    plan = StepPlan(step_id=2, slots=[slot], flags=[2 if num_seeds > 1 else 1])
    return DrawnRow(slot, logits_row, first_place, batch.seeds_of_row(plan, 0), position=5)


def test_rows_with_rules_are_drawn_by_them_and_others_keep_their_tokens(device: str) -> None:
    logits = torch.zeros((3, VOCAB_SIZE), device=device)
    logits[:, 7], logits[:, 9] = 5.0, 4.0
    banned = SlotRules(TokenRules(bad_words=((7,),), frequency_penalty=1.5), (1, 2), (), ())
    allowed = SlotRules(TokenRules(allowed_token_ids=(3, 4)), (1, 2), (), ())
    batch = batch_of(
        device,
        OpenSlot(0, 1, (1,), 0.0, 1.0, 0, None),
        OpenSlot(1, 2, (2,), 0.0, 1.0, 0, None, banned),
        OpenSlot(2, 3, tuple(range(12)), 1.0, 1.0, 0, None, allowed),
    )
    before = logits.clone()
    batch.last_sampled.fill_(7)
    token_ids = torch.full((15,), 7, dtype=torch.int32, device=device)
    rows = [row(batch, 0, 0, 0), row(batch, 1, 1, 1), row(batch, 2, 2, 2, num_seeds=12)]

    redraw(rows, batch, logits, token_ids, PlainBuffer(device))  # type: ignore[arg-type]

    assert token_ids[:2].tolist() == [7, 9]
    assert set(token_ids[2:14].tolist()) == {3, 4}
    assert token_ids[14].item() == 7
    assert batch.last_sampled.tolist() == [7, 9, token_ids[2].item(), 7]
    assert torch.equal(logits, before)

    redraw(rows[:2], batch, logits, token_ids, PlainBuffer(device))  # type: ignore[arg-type]
    assert token_ids[1].item() == 9  # 4.0 - 1.5 is still above 0
    redraw(rows[:2], batch, logits, token_ids, PlainBuffer(device))  # type: ignore[arg-type]
    assert token_ids[1].item() == 9  # 4.0 - 3.0
    redraw(rows[:2], batch, logits, token_ids, PlainBuffer(device))  # type: ignore[arg-type]
    assert token_ids[1].item() == 0  # 4.0 - 4.5 is below the others


def test_step_whose_rows_have_no_rules_is_left_as_it_is(device: str) -> None:
    batch = batch_of(device, OpenSlot(0, 1, (1,), 0.0, 1.0, 0, None))
    token_ids = torch.tensor([7], dtype=torch.int32, device=device)
    redraw([row(batch, 0, 0, 0)], batch, torch.zeros((1, VOCAB_SIZE), device=device), token_ids, PlainBuffer(device))  # type: ignore[arg-type]
    assert token_ids.tolist() == [7]
