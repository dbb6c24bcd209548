"""Dense layers of few rows between residuals, each in one launch, on Hopper."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.worker.kernels.hopper_product import PART, PARTS, SWIZZLED, TILE, hopper_product_kernel
from octavo.worker.kernels.overlap import launch_options

MAX_ROWS = 64
MIN_PADDED_ROWS = 16
SHARED_BYTES = 216 * 2**10
"""Of a multiprocessor's 227 KiB, filled with what is on its way; the rest is for barriers and changes of layout."""
MOST_SPLITS = 8


class Scratch:
    """What products of up to MAX_ROWS rows leave to their own programs and to the product after them."""

    def __init__(self, most_out_features: int, hidden_size: int, device: torch.device) -> None:
        """`most_out_features`: of layers without a gate. `hidden_size`: of what is normalised."""
        self.num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        most_tiles = triton.cdiv(most_out_features, TILE.value)
        sums = max(most_tiles, self.num_programs) * TILE.value * MAX_ROWS
        self.partials = torch.empty(sums, dtype=torch.float32, device=device)
        """Sums over a split of the input features: for each PART features and each split [rows, PART]."""
        self.arrivals = torch.zeros(2 * most_tiles, dtype=torch.int32, device=device)
        """How many splits of each PART features are there; zero between launches."""
        self.num_squares = triton.next_power_of_2(triton.cdiv(hidden_size, PART.value))
        self.squares = torch.empty((MAX_ROWS, self.num_squares), dtype=torch.float32, device=device)
        """For each row its squares' sums over PART features each."""


def pad_rows(num_rows: int) -> int:
    """Rows that a kernel for `num_rows` computes."""
    return max(MIN_PADDED_ROWS, 1 << (num_rows - 1).bit_length())


def add_product(
    residual: Tensor, x: Tensor, weight: Tensor, norm: Tensor, scratch: Scratch, *, overlaps: bool
) -> Tensor:
    """Add x W^T to `residual` [num_rows, out_features] in place, and leave in `scratch` what its RMSNorm divides by.

    `x` is [num_rows, in_features], `weight` [out_features, in_features]. All are bfloat16 and dense, but rows of x may
    lie any multiple of 16 bytes apart. Returns the residual times `norm` [out_features], which is RMSNorm but for a
    factor for each row, for the two functions below. `overlaps`: see kernels.overlap.
    """
    normed = torch.empty_like(residual)
    _launch(x, weight, residual, scratch, norm=norm, normed=normed, overlaps=overlaps)
    return normed


def normed_product(
    normed: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scratch: Scratch, *, overlaps: bool
) -> Tensor:
    """RMSNorm(residual) W^T + b, [num_rows, out_features], of what `add_product` returned last."""
    out = normed.new_empty((len(normed), len(weight)))
    _launch(normed, weight, out, scratch, bias=bias, eps=eps, overlaps=overlaps)
    return out


def gated_product(normed: Tensor, weight: Tensor, eps: float, scratch: Scratch, *, overlaps: bool) -> Tensor:
    """silu(RMSNorm(residual) G^T) times RMSNorm(residual) U^T, of what `add_product` returned last.

    `weight` is G, then U: [2 * out_features, in_features].
    """
    out = normed.new_empty((len(normed), len(weight) // 2))
    _launch(normed, weight, out, scratch, eps=eps, is_gated=True, overlaps=overlaps)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scratch: Scratch,
    *,
    norm: Tensor | None = None,
    normed: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    overlaps: bool,
) -> None:
    num_rows, in_features = x.shape
    out_features = out.shape[1]
    rows = pad_rows(num_rows)
    num_tiles = triton.cdiv(out_features, TILE.value)
    splits = 1 if is_gated else count_splits(num_tiles, in_features, scratch.num_programs)
    hopper_product_kernel[(min(num_tiles * splits, scratch.num_programs),)](
        _describe(weight, PART.value),
        _describe(x, rows),
        out,
        scratch.partials,
        scratch.arrivals,
        scratch.squares,
        out if norm is None else norm,
        out if normed is None else normed,
        out if bias is None else bias,
        num_rows,
        in_features,
        out_features,
        num_tiles * splits,
        eps,
        ROWS=rows,
        STAGES=count_stages(rows, is_gated),
        SPLITS=splits,
        NUM_SQUARES=scratch.num_squares,
        IS_GATED=is_gated,
        ADDS=norm is not None,
        HAS_BIAS=bias is not None,
        OVERLAPS=overlaps,
        num_warps=4,
        **launch_options(overlaps),
    )


def count_splits(num_tiles: int, in_features: int, num_programs: int) -> int:
    """Into how many parts the input features are cut, so that the tiles keep all programs busy."""
    depth: int = 2 * PART.value
    num_turns = -(-in_features // depth)
    return max(1, min(num_programs // num_tiles, num_turns, MOST_SPLITS))


def count_stages(rows: int, is_gated: bool) -> int:
    """Tiles of weight and x that shared memory holds."""
    part: int = PART.value
    lines: int = PARTS.value * part + (1 if is_gated else 2) * rows
    return SHARED_BYTES // (lines * part * 2)


def _describe(matrix: Tensor, lines: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [lines, PART.value], SWIZZLED.value)
