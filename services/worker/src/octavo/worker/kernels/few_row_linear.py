"""Linear layers of one to four rows that add to a residual: bound by reading the weight, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 4
"""Rows above which the library's matrix products are faster."""
PADDED_ROWS = 16
"""Columns of the smallest matrix product; the rows of x are padded to it."""
TILING = (32, 256, 4, 4)
"""Output features of a program, input features of a turn, warps, stages of the pipeline."""


@triton.jit
def _add_few_row_linear_kernel(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features]
    bias_ptr,  # [out_features], read if HAS_BIAS
    residual_ptr,  # [num_rows, out_features]
    num_rows,
    in_features,
    out_features,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,  # output features of a program
    INS: tl.constexpr,  # input features of a turn
    IS_EVEN: tl.constexpr,  # the turns fill in_features, the programs out_features
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """residual += x W^T + b. Grid: (programs of OUTS features,)."""
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, INS)
    is_row = row < num_rows
    is_out = out < out_features
    x_at = row[None, :] * in_features + lane[:, None]
    weight_at = out.to(tl.int64)[:, None] * in_features + lane[None, :]
    result = tl.zeros([OUTS, ROWS], tl.float32)
    for start in tl.range(0, in_features, INS):
        if IS_EVEN:
            weight = tl.load(weight_ptr + start + weight_at)
            x = tl.load(x_ptr + start + x_at, mask=is_row[None, :], other=0.0)
        else:
            inside = start + lane < in_features
            weight = tl.load(weight_ptr + start + weight_at, mask=is_out[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + start + x_at, mask=is_row[None, :] & inside[:, None], other=0.0)
        result = tl.dot(weight, x, result, input_precision=PRECISION)
    if HAS_BIAS:
        result += tl.load(bias_ptr + out, mask=is_out, other=0.0).to(tl.float32)[:, None]
    at = row.to(tl.int64)[None, :] * out_features + out[:, None]
    is_real = is_row[None, :] & is_out[:, None]
    result += tl.load(residual_ptr + at, mask=is_real, other=0.0).to(tl.float32)
    tl.store(residual_ptr + at, result.to(residual_ptr.dtype.element_ty), mask=is_real)


def add_few_row_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    tiling: tuple[int, int, int, int] = TILING,
) -> Tensor:
    """Add x W^T + b to `residual` [num_rows, out_features] in place, and return it.

    `x` is [num_rows, in_features], at most MAX_ROWS rows; all are dense.
    """
    num_rows, in_features = x.shape
    out_features = len(weight)
    outs, ins, num_warps, num_stages = tiling
    _add_few_row_linear_kernel[(triton.cdiv(out_features, outs),)](
        x,
        weight,
        weight if bias is None else bias,
        residual,
        num_rows,
        in_features,
        out_features,
        ROWS=PADDED_ROWS,
        OUTS=outs,
        INS=ins,
        IS_EVEN=in_features % ins == 0 and out_features % outs == 0,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return residual
