"""RMSNorm of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_rows, row_size]
    weight_ptr,  # [row_size]
    out_ptr,  # [num_rows, row_size]
    x_stride,  # elements between rows of x; those of out are dense
    row_size,
    eps,
    BLOCK: tl.constexpr,  # row_size rounded up to a power of two
):
    """out = x / rms(x), rounded to the type of x, times weight. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < row_size
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / row_size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    normalised = (x * scale).to(weight.dtype) * weight
    tl.store(out_ptr + row * row_size + column, normalised, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the rows of `x` [num_rows, row_size], whose last dimension is dense."""
    num_rows, row_size = x.shape
    out = torch.empty((num_rows, row_size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(row_size)
    num_warps = max(1, min(8, block // 512))
    _rms_norm_kernel[(num_rows,)](x, weight, out, x.stride(0), row_size, eps, BLOCK=block, num_warps=num_warps)
    return out
