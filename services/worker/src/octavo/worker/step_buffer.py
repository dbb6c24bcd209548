"""How a step's inputs reach the GPU: one copy from pinned memory, which the host may refill meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Int32Array = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

ALIGNMENT = 4
"""Columns start at multiples of it, so that kernels may load 16 bytes at once."""


class StepBuffer:
    """Owns one buffer on the device and a ring of pinned ones. All int32.

    A pinned buffer is written again only after its last copy has ended. The device buffer is overwritten in the order
    of the stream, after all that was launched before.
    """

    def __init__(self, capacity: int, num_pinned: int, device: torch.device) -> None:
        self.capacity = capacity
        self.on_device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(capacity, dtype=torch.int32, pin_memory=True) for _ in range(num_pinned)]
        self._on_host = [pinned.numpy() for pinned in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(num_pinned)]  # type: ignore[no-untyped-call]
        self._next = 0

    def send(self, columns: Sequence[Int32Array]) -> list[Tensor]:
        """Copy the columns, in stream order. Returns where each is on the device: `views` of their lengths."""
        index, self._next = self._next, (self._next + 1) % len(self._pinned)
        self._copied[index].synchronize()
        host = self._on_host[index]
        end = 0
        views = []
        for column in columns:
            begin = end
            host[begin : begin + len(column)] = column
            views.append(self.on_device[begin : begin + len(column)])
            end = _aligned(begin + len(column))
        self.on_device[:end].copy_(self._pinned[index][:end], non_blocking=True)
        self._copied[index].record()
        return views

    def views(self, lengths: Sequence[int]) -> list[Tensor]:
        """Where columns of these lengths are put by `send`, whatever follows them."""
        end = 0
        views = []
        for length in lengths:
            views.append(self.on_device[end : end + length])
            end = _aligned(end + length)
        return views


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
