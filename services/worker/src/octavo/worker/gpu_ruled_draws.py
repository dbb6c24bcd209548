"""Draws again for rows whose slots have rules: the step has drawn for all rows as if there were none.

So the other rows keep their graphs and wait for nobody, and nothing here asks the device for a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.worker.gpu_batch import GpuBatch
from octavo.worker.kernels.sample import sample
from octavo.worker.logit_rules import take_masks
from octavo.worker.step_buffer import Int32Array, StepBuffer
from octavo.worker.step_columns import NUM_DRAW_COLUMNS, draw_columns


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """A row of logits, and what was drawn from it."""

    slot: int
    logits_row: int
    first_place: int
    """Place of its first token among those of the step; one follows for each further seed."""
    seeds: Int32Array  # [num_seeds, 2]
    position: int
    """Index of the new tokens in their sequence."""


def redraw(rows: Sequence[DrawnRow], batch: GpuBatch, logits: Tensor, token_ids: Tensor, buffer: StepBuffer) -> None:
    """Change the tokens of the rows that have rules, and what feeds their slots, in the order of the stream.

    `logits` is [num_rows, vocab_size] and stays as it is; `token_ids` is int32 [num_draws].
    """
    rows = [row for row in rows if row.slot in batch.rules]
    ruled = []
    for row, code in zip(rows, take_masks([batch.rules[row.slot] for row in rows]), strict=True):
        if code:
            token_ids[row.first_place : row.first_place + len(row.seeds)].fill_(code)
        else:
            ruled.append(row)
    if not ruled:
        return
    changed = torch.stack([batch.rules[row.slot].apply(logits[row.logits_row].float(), row.position) for row in ruled])
    views = buffer.send(_columns(ruled, batch))
    drawn = torch.empty(len(views[0]), dtype=torch.int32, device=logits.device)
    sample(changed, draw_columns(views[:NUM_DRAW_COLUMNS]), batch.last_sampled, drawn)
    token_ids.index_copy_(0, views[NUM_DRAW_COLUMNS].to(torch.int64), drawn)
    first = 0
    for row in ruled:
        batch.rules[row.slot].push(drawn[first : first + 1].clamp_min(0).to(torch.int64))
        first += len(row.seeds)


def _columns(rows: Sequence[DrawnRow], batch: GpuBatch) -> list[Int32Array]:
    """The draw columns, then the place of each token."""
    counts = np.array([len(row.seeds) for row in rows])
    firsts = np.cumsum(counts) - counts
    slots = np.array([row.slot for row in rows])
    fed_slots = np.full(counts.sum(), -1)
    fed_slots[firsts] = slots
    places = np.concatenate([np.arange(row.first_place, row.first_place + len(row.seeds)) for row in rows])
    return [
        np.repeat(np.arange(len(rows)), counts).astype(np.int32),
        *batch.settings_columns(np.repeat(slots, counts)),
        np.ascontiguousarray(np.concatenate([row.seeds for row in rows])).reshape(-1),
        np.repeat([row.position for row in rows], counts).astype(np.int32),
        fed_slots.astype(np.int32),
        places.astype(np.int32),
    ]
