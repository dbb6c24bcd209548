"""Linear layers of one to four rows, bound by reading the weight, with what comes before and after them fused in."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 4
"""Rows above which the library's matrix products are faster."""
PADDED_ROWS = 16
"""Columns of the smallest matrix product; the rows of x are padded to it."""


@triton.jit
def _few_row_linear_kernel(
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features]; if IS_GATED twice as many rows: gate, then up
    bias_ptr,  # like a column of the weight, read if HAS_BIAS
    norm_ptr,  # [in_features], read if HAS_NORM
    residual_ptr,  # [num_rows, out_features], read if HAS_RESIDUAL; may be out
    out_ptr,  # [num_rows, out_features]
    num_rows,
    in_features,
    out_features,
    eps,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,  # output features of a program
    INS: tl.constexpr,  # input features of a turn
    IS_EVEN: tl.constexpr,  # the turns fill in_features, the programs out_features
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out = residual + norm(x) W^T + b; if IS_GATED, silu(gate) * up of it. Grid: (programs of OUTS features,)."""
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, INS)
    is_row = row < num_rows
    is_out = out < out_features
    x_at = row[None, :] * in_features + lane[:, None]
    weight_at = out.to(tl.int64)[:, None] * in_features + lane[None, :]
    up_at = weight_at + tl.cast(out_features, tl.int64) * in_features
    result = tl.zeros([OUTS, ROWS], tl.float32)
    up = tl.zeros([OUTS, ROWS], tl.float32)
    squares = tl.zeros([INS, ROWS], tl.float32)
    for start in tl.range(0, in_features, INS):
        inside = start + lane < in_features
        if IS_EVEN:
            weight = tl.load(weight_ptr + start + weight_at)
            x = tl.load(x_ptr + start + x_at, mask=is_row[None, :], other=0.0)
        else:
            weight = tl.load(weight_ptr + start + weight_at, mask=is_out[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + start + x_at, mask=is_row[None, :] & inside[:, None], other=0.0)
        if HAS_NORM:
            squares += x.to(tl.float32) * x.to(tl.float32)
            x = x * tl.load(norm_ptr + start + lane, mask=inside, other=0.0)[:, None]
        result = tl.dot(weight, x, result, input_precision=PRECISION)
        if IS_GATED:
            if IS_EVEN:
                up_weight = tl.load(weight_ptr + start + up_at)
            else:
                up_weight = tl.load(weight_ptr + start + up_at, mask=is_out[:, None] & inside[None, :], other=0.0)
            up = tl.dot(up_weight, x, up, input_precision=PRECISION)
    if HAS_NORM:
        scale = (1.0 / tl.sqrt(tl.sum(squares, 0) / in_features + eps))[None, :]
        result *= scale
        if IS_GATED:
            up *= scale
    if HAS_BIAS:
        result += tl.load(bias_ptr + out, mask=is_out, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up += tl.load(bias_ptr + out_features + out, mask=is_out, other=0.0).to(tl.float32)[:, None]
    if IS_GATED:
        result = result / (1.0 + tl.exp(-result)) * up
    at = row.to(tl.int64)[None, :] * out_features + out[:, None]
    is_real = is_row[None, :] & is_out[:, None]
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + at, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=is_real)


def few_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    is_gated: bool = False,
    out: Tensor | None = None,
    tiling: tuple[int, int, int, int] = (16, 256, 4, 4),
) -> Tensor:
    """`residual` + norm(x) W^T + b for `x` [num_rows, in_features], at most MAX_ROWS rows, all dense.

    `norm` is the weight of an RMSNorm of x. With `is_gated` the first half of the outputs, through SiLU, multiplies the
    second. `out`, which may be `residual`, is filled and returned; one is made if none is given. `tiling` is (output
    features of a program, input features of a turn, warps, stages of the pipeline).
    """
    num_rows, in_features = x.shape
    out_features = weight.shape[0] // 2 if is_gated else weight.shape[0]
    if out is None:
        out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    outs, ins, num_warps, num_stages = tiling
    _few_row_linear_kernel[(triton.cdiv(out_features, outs),)](
        x,
        weight,
        weight if bias is None else bias,
        weight if norm is None else norm,
        out if residual is None else residual,
        out,
        num_rows,
        in_features,
        out_features,
        eps,
        ROWS=PADDED_ROWS,
        OUTS=outs,
        INS=ins,
        IS_EVEN=in_features % ins == 0 and out_features % outs == 0,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None,
        IS_GATED=is_gated,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
