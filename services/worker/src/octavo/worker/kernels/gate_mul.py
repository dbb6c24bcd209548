"""The gate of the MLP, rounded to e4m3 where a product of e4m3 follows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.kernels.overlap import begin_after_previous, launch_options
from octavo.worker.kernels.quantize_rows import empty_e4m3, round_row
from octavo.worker.models.fp8_linear import LARGEST, LEAST_SCALE

BLOCK = 1024


@triton.jit
def _gate_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * size]: gate, then up
    out_ptr,  # [num_rows, size]; e4m3 if TO_E4M3
    scales_ptr,  # out: float32 [num_rows], written if TO_E4M3
    size,
    BLOCK: tl.constexpr,  # at least size if TO_E4M3
    IS_GELU: tl.constexpr,
    TO_E4M3: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """out = activation(gate), rounded to the type of gate, times up. Grid: (num_rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    begin_after_previous(OVERLAPS)
    gate = tl.load(gate_up_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + column, mask=inside, other=0.0)
    # gelu(x) = x / 2 (1 + tanh(z)) = x sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
    slope = 1.0
    if IS_GELU:
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
    activated = gate / (1.0 + tl.exp(-slope * gate))
    product = activated.to(up.dtype) * up
    if TO_E4M3:
        rounded, scale = round_row(product.to(tl.float32), LARGEST, LEAST_SCALE)
        tl.store(out_ptr + row * size + column, rounded.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(scales_ptr + row, scale)
    else:
        tl.store(out_ptr + row * size + column, product, mask=inside)


def silu_mul(gate_up: Tensor, *, overlaps: bool = False) -> Tensor:
    """[num_rows, 2 * size], dense, to [num_rows, size]. `overlaps`: see kernels.overlap."""
    return _gate_mul(gate_up, False, overlaps)


def gelu_mul(gate_up: Tensor, *, overlaps: bool = False) -> Tensor:
    """The same with GELU in its tanh form."""
    return _gate_mul(gate_up, True, overlaps)


def gate_mul_e4m3(gate_up: Tensor, is_gelu: bool, *, overlaps: bool = False) -> tuple[Tensor, Tensor]:
    """What `quantize_rows` gives of either: e4m3 [num_rows, size], float32 scales [num_rows, 1]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    stored, scales = empty_e4m3(num_rows, size, gate_up.device)
    _launch(gate_up, stored, scales, triton.next_power_of_2(size), is_gelu, overlaps)
    return stored, scales


def _gate_mul(gate_up: Tensor, is_gelu: bool, overlaps: bool) -> Tensor:
    out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, out, None, BLOCK, is_gelu, overlaps)
    return out


def _launch(gate_up: Tensor, out: Tensor, scales: Tensor | None, block: int, is_gelu: bool, overlaps: bool) -> None:
    num_rows, size = out.shape
    _gate_mul_kernel[(num_rows, triton.cdiv(size, block))](
        gate_up,
        out,
        out if scales is None else scales,
        size,
        BLOCK=block,
        IS_GELU=is_gelu,
        TO_E4M3=scales is not None,
        LARGEST=LARGEST,
        LEAST_SCALE=LEAST_SCALE,
        OVERLAPS=overlaps,
        num_warps=8 if block > 2048 else 4,
        **launch_options(overlaps),
    )
