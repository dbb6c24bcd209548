"""A step's inputs stay as they are until its own upload has read them (swp-7f4), while the stream is behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.worker.step_buffer import StepBuffer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NUM_STEPS = 200
LENGTH = 4096
SLEEP_CYCLES = 2_000_000
"""About a millisecond: longer than the host needs for many steps."""


def test_each_step_reads_its_own_tables_while_uploads_are_late() -> None:
    """Two batches with disjoint tables take turns, two steps ahead of the GPU."""
    device = torch.device("cuda")
    buffer = StepBuffer(2 * LENGTH, 2, device)
    seen = torch.zeros((NUM_STEPS, 2, LENGTH), dtype=torch.int32, device=device)
    for step in range(NUM_STEPS):
        if step % 3 == 0:
            torch.cuda._sleep(SLEEP_CYCLES)
        first = np.full(LENGTH, step, dtype=np.int32)
        second = np.arange(LENGTH, dtype=np.int32) + 10_000 * (step % 2)
        for place, view in enumerate(buffer.send([first, second])):
            seen[step, place] = view
        first[:] = second[:] = -1
    found = seen.cpu()
    steps = torch.arange(NUM_STEPS, dtype=torch.int32)
    assert torch.equal(found[:, 0], steps[:, None].expand(-1, LENGTH))
    offsets = 10_000 * (steps % 2)
    assert torch.equal(found[:, 1], torch.arange(LENGTH, dtype=torch.int32)[None] + offsets[:, None])
