"""The gate of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * size]: gate, then up
    out_ptr,  # [num_rows, size]
    size,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    """out = activation(gate), rounded to the type of gate, times up. Grid: (num_rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    # gelu(x) = x / 2 (1 + tanh(z)) = x sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
    slope = 1.0
    if IS_GELU:
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
    activated = gate / (1.0 + tl.exp(-slope * gate))
    tl.store(out_ptr + row * size + column, activated.to(up.dtype) * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_rows, 2 * size], dense, to [num_rows, size]."""
    return _gate_mul(gate_up, is_gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """The same with GELU in its tanh form."""
    return _gate_mul(gate_up, is_gelu=True)


def _gate_mul(gate_up: Tensor, is_gelu: bool) -> Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(size, BLOCK))
    _gate_mul_kernel[grid](gate_up, out, size, BLOCK=BLOCK, IS_GELU=is_gelu, num_warps=4)
    return out
