"""Rounds rows to e4m3, each by a scale of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.models.fp8_linear import LARGEST, LEAST_SCALE


@triton.jit
def round_row(x, LARGEST: tl.constexpr, LEAST_SCALE: tl.constexpr):
    """A whole row of float32, divided by its scale and within the range of e4m3, and the scale."""
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, LEAST_SCALE)
    return tl.clamp(x / scale, -LARGEST, LARGEST), scale


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [num_rows, size]
    stored_ptr,  # out: e4m3 [num_rows, size]
    scales_ptr,  # out: float32 [num_rows]
    row_stride,  # elements between rows of x
    size,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,  # size, rounded up to a power of two
):
    """Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded, scale = round_row(x, LARGEST, LEAST_SCALE)
    tl.store(stored_ptr + row * size + column, rounded.to(stored_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + row, scale)


def empty_e4m3(num_rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for rows of e4m3, [num_rows, size], and their scales, float32 [num_rows, 1]."""
    stored = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=device)
    return stored, torch.empty((num_rows, 1), dtype=torch.float32, device=device)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `models.fp8_linear.to_rows_of_e4m3` gives, in one launch. `x` is [num_rows, size], its rows dense."""
    num_rows, size = x.shape
    stored, scales = empty_e4m3(num_rows, size, x.device)
    _quantize_rows_kernel[(num_rows,)](
        x,
        stored,
        scales,
        x.stride(0),
        size,
        LARGEST=LARGEST,
        LEAST_SCALE=LEAST_SCALE,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
    return stored, scales
