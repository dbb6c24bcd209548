"""Dense layers of a single row, bound by reading the weight: norm, bias, gate and residual in the same launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.kernels.overlap import begin_after_previous, launch_options

Tiling = tuple[int, int, int, int]
TILING: Tiling = (8, 1024, 4, 3)
"""Rows of the weight that a program reads (a gate and its other half are two), features of a turn, warps, stages."""


@triton.jit
def _single_row_product_kernel(
    x_ptr,  # [in_features]
    weight_ptr,  # [out_features, in_features]; if IS_GATED twice as many rows: gates, then what they gate
    bias_ptr,  # a number for each row of the weight, read if HAS_BIAS
    norm_ptr,  # [in_features], read if HAS_NORM
    out_ptr,  # [out_features]
    in_features,
    out_features,
    eps,
    OUTS: tl.constexpr,  # output features of a program
    INS: tl.constexpr,  # input features of a turn
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,  # the turns fill in_features, the programs out_features
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_GATED: tl.constexpr,
    ADDS: tl.constexpr,  # to what `out` holds
    OVERLAPS: tl.constexpr,
):
    """Grid: (programs of OUTS features,). Sums are float32, and nothing is rounded before the end."""
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    lane = tl.arange(0, INS)
    is_out = out < out_features
    weight_at = out.to(tl.int64)[:, None] * in_features + lane[None, :]
    gated_ptr = weight_ptr + tl.cast(out_features, tl.int64) * in_features
    inside = lane < in_features
    readable = is_out[:, None] & inside[None, :]
    if IS_EVEN:
        weight = tl.load(weight_ptr + weight_at)
        if IS_GATED:
            gated = tl.load(gated_ptr + weight_at)
    else:
        weight = tl.load(weight_ptr + weight_at, mask=readable, other=0.0)
        if IS_GATED:
            gated = tl.load(gated_ptr + weight_at, mask=readable, other=0.0)
    # The first tile of the weight is on its way before the kernel waits for x.
    begin_after_previous(OVERLAPS)
    x = tl.load(x_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    squares = tl.zeros([INS], tl.float32)
    if HAS_NORM:
        squares += x * x
        x *= tl.load(norm_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    products = weight.to(tl.float32) * x[None, :]
    if IS_GATED:
        gated_products = gated.to(tl.float32) * x[None, :]
    for start in tl.range(INS, in_features, INS, num_stages=STAGES):
        if IS_EVEN:
            tile = tl.load(weight_ptr + start + weight_at)
            if IS_GATED:
                gated_tile = tl.load(gated_ptr + start + weight_at)
            part = tl.load(x_ptr + start + lane).to(tl.float32)
            if HAS_NORM:
                norms = tl.load(norm_ptr + start + lane).to(tl.float32)
        else:
            is_in = start + lane < in_features
            is_there = is_out[:, None] & is_in[None, :]
            tile = tl.load(weight_ptr + start + weight_at, mask=is_there, other=0.0)
            if IS_GATED:
                gated_tile = tl.load(gated_ptr + start + weight_at, mask=is_there, other=0.0)
            part = tl.load(x_ptr + start + lane, mask=is_in, other=0.0).to(tl.float32)
            if HAS_NORM:
                norms = tl.load(norm_ptr + start + lane, mask=is_in, other=0.0).to(tl.float32)
        factors = part
        if HAS_NORM:
            squares += part * part
            factors = part * norms
        products += tile.to(tl.float32) * factors[None, :]
        if IS_GATED:
            gated_products += gated_tile.to(tl.float32) * factors[None, :]
    result = tl.sum(products, 1)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / in_features + eps)
        result *= scale
    if HAS_BIAS:
        result += tl.load(bias_ptr + out, mask=is_out, other=0.0).to(tl.float32)
    if IS_GATED:
        other = tl.sum(gated_products, 1) * scale
        if HAS_BIAS:
            other += tl.load(bias_ptr + out_features + out, mask=is_out, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * other
    if ADDS:
        result += tl.load(out_ptr + out, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + out, result.to(out_ptr.dtype.element_ty), mask=is_out)


def single_row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    add_to: Tensor | None = None,
    is_gated: bool = False,
    overlaps: bool = False,
    tiling: Tiling = TILING,
) -> Tensor:
    """x W^T + b of one row: `x` is [1, in_features], `weight` [out_features, in_features], all dense.

    With `norm`, [in_features], x is normalised first (RMSNorm). If it `is_gated` the weight's first half are gates,
    the second what they gate, and the result is silu(gate) times the other, half as wide. With `add_to`,
    [1, out_features], the result is added to it in place, and it is returned. `overlaps`: see kernels.overlap.
    """
    in_features = x.shape[1]
    out_features = len(weight) // 2 if is_gated else len(weight)
    out = x.new_empty((1, out_features)) if add_to is None else add_to
    rows, ins, num_warps, stages = tiling
    outs = max(1, rows // 2) if is_gated else rows
    ins = min(ins, triton.next_power_of_2(in_features))
    _single_row_product_kernel[(triton.cdiv(out_features, outs),)](
        x,
        weight,
        weight if bias is None else bias,
        x if norm is None else norm,
        out,
        in_features,
        out_features,
        eps,
        OUTS=outs,
        INS=ins,
        STAGES=stages,
        IS_EVEN=in_features % ins == 0 and out_features % outs == 0,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        IS_GATED=is_gated,
        ADDS=add_to is not None,
        OVERLAPS=overlaps,
        num_warps=num_warps,
        **launch_options(overlaps),
    )
    return out
