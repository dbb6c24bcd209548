"""The gate of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * size]: gate, then up
    out_ptr,  # [num_rows, size]
    size,
    BLOCK: tl.constexpr,
):
    """out = silu(gate), rounded to the type of gate, times up. Grid: (num_rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * size + column, silu.to(up.dtype) * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_rows, 2 * size], dense, to [num_rows, size]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(num_rows, triton.cdiv(size, BLOCK))](gate_up, out, size, BLOCK=BLOCK, num_warps=4)
    return out
