"""RMSNorm of rows, rounded to e4m3 where a product of e4m3 follows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.kernels.overlap import begin_after_previous, launch_options
from octavo.worker.kernels.quantize_rows import empty_e4m3, round_row
from octavo.worker.models.fp8_linear import LARGEST, LEAST_SCALE


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_rows, row_size]
    weight_ptr,  # [row_size]
    out_ptr,  # [num_rows, row_size]; e4m3 if TO_E4M3
    scales_ptr,  # out: float32 [num_rows], written if TO_E4M3
    x_stride,  # elements between rows of x; those of out are dense
    row_size,
    eps,
    BLOCK: tl.constexpr,  # row_size rounded up to a power of two
    TO_E4M3: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = x / rms(x), rounded to the type of x, times weight. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < row_size
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    begin_after_previous(OVERLAPS)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / row_size + eps)
    normalised = (x * scale).to(weight.dtype) * weight
    if TO_E4M3:
        rounded, row_scale = round_row(normalised.to(x_ptr.dtype.element_ty).to(tl.float32), LARGEST, LEAST_SCALE)
        tl.store(out_ptr + row * row_size + column, rounded.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(scales_ptr + row, row_scale)
    else:
        tl.store(out_ptr + row * row_size + column, normalised, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, overlaps: bool = False) -> Tensor:
    """Normalise the rows of `x` [num_rows, row_size], whose last dimension is dense.

    `overlaps`: see kernels.overlap.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, eps, out, None, overlaps)
    return out


def rms_norm_e4m3(x: Tensor, weight: Tensor, eps: float, *, overlaps: bool = False) -> tuple[Tensor, Tensor]:
    """What `quantize_rows` gives of the normalised rows: e4m3 [num_rows, row_size], float32 scales [num_rows, 1]."""
    num_rows, row_size = x.shape
    stored, scales = empty_e4m3(num_rows, row_size, x.device)
    _launch(x, weight, eps, stored, scales, overlaps)
    return stored, scales


def _launch(x: Tensor, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, overlaps: bool) -> None:
    num_rows, row_size = x.shape
    block = triton.next_power_of_2(row_size)
    _rms_norm_kernel[(num_rows,)](
        x,
        weight,
        out,
        out if scales is None else scales,
        x.stride(0),
        row_size,
        eps,
        BLOCK=block,
        TO_E4M3=scales is not None,
        LARGEST=LARGEST,
        LEAST_SCALE=LEAST_SCALE,
        OVERLAPS=overlaps,
        num_warps=max(1, min(8, block // 512)),
        **launch_options(overlaps),
    )
