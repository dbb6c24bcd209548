"""Dense layers of several rows on Hopper, bound by reading the weight: written in Gluon.

A warp copies tiles of the weight into shared memory, as many as fit there, from before the kernel is allowed to read
what earlier ones wrote. Two groups of four warps multiply 64 or 128 features each, with the weight as the left operand,
so that the rows of x are the columns of a result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PART = gl.constexpr(64)
"""Features of one matrix product, and its depth: what is copied at once is PART x PART of the weight."""
PARTS = gl.constexpr(4)
"""Of a stage: two deep for two groups of PART features; or one deep, and for each group PART gates and PART others."""
TILE = gl.constexpr(128)
"""Output features of a program."""
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
"""Of a group's threads over [rows, features], where partial sums are added up."""
MULTIPLYING_REGISTERS = gl.constexpr(208)
COPYING_REGISTERS = gl.constexpr(48)

_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Of a group of warps; Triton 3.7 gave it another name."""


@gluon.jit
def _cut(unit, in_features, SPLITS: gl.constexpr, DEPTH: gl.constexpr):
    """First turn of a unit, which is a tile's share of the input features, and how many turns it has."""
    num_turns = gl.cdiv(in_features, DEPTH)
    split = unit % SPLITS
    begin = split * num_turns // SPLITS
    return begin, (split + 1) * num_turns // SPLITS - begin


@gluon.jit
def _copy_weight(weight, ring, stage, tile, column, out_features, ROWS: gl.constexpr, IS_GATED: gl.constexpr):
    weights, full = ring[0], ring[2]
    mbarrier.expect(full.index(stage), (PARTS * PART + (1 if IS_GATED else 2) * ROWS) * PART * 2)
    for part in gl.static_range(PARTS):
        if IS_GATED:
            row, at = tile * TILE + part // 2 * PART + part % 2 * out_features, column
        else:
            row, at = tile * TILE + part % 2 * PART, column + part // 2 * PART
        tma.async_copy_global_to_shared(weight, [row, at], full.index(stage), weights.index(PARTS * stage + part))


@gluon.jit
def _copy_x(x, ring, stage, column, IS_GATED: gl.constexpr):
    xs, full = ring[1], ring[2]
    if IS_GATED:
        tma.async_copy_global_to_shared(x, [0, column], full.index(stage), xs.index(stage))
    else:
        tma.async_copy_global_to_shared(x, [0, column], full.index(stage), xs.index(2 * stage))
        tma.async_copy_global_to_shared(x, [0, column + PART], full.index(stage), xs.index(2 * stage + 1))


@gluon.jit
def _copy(
    weight,
    x,
    ring,
    sizes,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    IS_GATED: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """What the copying warp does. The weight is nobody's result, so it does not wait for the kernel before."""
    _, in_features, out_features, num_units = sizes
    DEPTH: gl.constexpr = PART if IS_GATED else 2 * PART
    free = ring[3]
    program = gl.program_id(0)
    begin, turns = _cut(program, in_features, SPLITS, DEPTH)
    ahead = gl.minimum(turns, STAGES)
    for turn in range(ahead):
        _copy_weight(weight, ring, turn, program // SPLITS, (begin + turn) * DEPTH, out_features, ROWS, IS_GATED)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    for turn in range(ahead):
        _copy_x(x, ring, turn, (begin + turn) * DEPTH, IS_GATED)
    copied = ahead
    for unit in range(program, num_units, gl.num_programs(0)):
        begin, turns = _cut(unit, in_features, SPLITS, DEPTH)
        for turn in range(gl.where(unit == program, ahead, 0), turns):
            stage = copied % STAGES
            mbarrier.wait(free.index(stage), (copied // STAGES & 1) ^ 1)
            column = (begin + turn) * DEPTH
            _copy_weight(weight, ring, stage, unit // SPLITS, column, out_features, ROWS, IS_GATED)
            _copy_x(x, ring, stage, column, IS_GATED)
            copied += 1


@gluon.jit
def _multiply_unit(
    ring, used, turns, HALF: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, IS_GATED: gl.constexpr
):
    """Sums of PART features by ROWS; of the features that those gate, too, if they are gates."""
    weights, xs, full, free = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sums = gl.zeros([PART, ROWS], gl.float32, layout)
    others = gl.zeros([PART, ROWS], gl.float32, layout)
    for _ in range(turns):
        stage = used % STAGES
        first = PARTS * stage
        mbarrier.wait(full.index(stage), used // STAGES & 1)
        if IS_GATED:
            columns = xs.index(stage).permute((1, 0))
            sums = warpgroup_mma(weights.index(first + 2 * HALF), columns, sums, is_async=True)
            others = warpgroup_mma(weights.index(first + 2 * HALF + 1), columns, others, is_async=True)
            sums, others = warpgroup_mma_wait(0, deps=[sums, others])
        else:
            sums = warpgroup_mma(weights.index(first + HALF), xs.index(2 * stage).permute((1, 0)), sums, is_async=True)
            columns = xs.index(2 * stage + 1).permute((1, 0))
            sums = warpgroup_mma(weights.index(first + 2 + HALF), columns, sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index(stage))
        used += 1
    return sums, others, used


@gluon.jit
def _norm_factors(squares_ptr, eps, in_features, rows, num_rows, NUM_SQUARES: gl.constexpr):
    """1 / rms of `rows`, which lie along FLAT's first dimension."""
    index = gl.arange(0, NUM_SQUARES, gl.SliceLayout(0, FLAT))
    inside = (rows < num_rows)[:, None] & (index < gl.cdiv(in_features, PART))[None, :]
    squares = gl.load(squares_ptr + rows[:, None] * NUM_SQUARES + index[None, :], mask=inside, other=0.0)
    return 1.0 / gl.sqrt(gl.sum(squares, 1) / in_features + eps)


@gluon.jit
def _store_gated(gates, others, factors, first_out, out_ptr, num_rows, out_features):
    gates *= factors
    result = gates / (1.0 + gl.exp(-gates)) * (others * factors)
    result = gl.convert_layout(result.to(out_ptr.dtype.element_ty).trans(), FLAT)
    row = gl.arange(0, gates.shape[1], gl.SliceLayout(1, FLAT))[:, None]
    out = first_out + gl.arange(0, PART, gl.SliceLayout(0, FLAT))[None, :]
    gl.store(out_ptr + row * out_features + out, result, mask=(row < num_rows) & (out < out_features))


@gluon.jit
def _add_up(
    given,
    sizes,
    partials_ptr,
    first_out,
    SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
    NUM_SQUARES: gl.constexpr,
    ADDS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Sum what the splits of PART features left, always in the same order, and store what is made of it."""
    out_ptr, squares_ptr, norm_ptr, normed_ptr, bias_ptr, eps = given
    num_rows, in_features, out_features, _ = sizes
    feature = gl.arange(0, PART, gl.SliceLayout(0, FLAT))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    out = first_out + feature
    is_out, is_row = out < out_features, row < num_rows
    inside = is_row[:, None] & is_out[None, :]
    at = row[:, None] * PART + feature[None, :]
    total = gl.load(partials_ptr + at, mask=inside, other=0.0)
    for split in gl.static_range(1, SPLITS):
        total += gl.load(partials_ptr + split * ROWS * PART + at, mask=inside, other=0.0)
    out_at = row[:, None] * out_features + out[None, :]
    if ADDS:
        total += gl.load(out_ptr + out_at, mask=inside, other=0.0).to(gl.float32)
        stored = total.to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + out_at, stored, mask=inside)
        total = stored.to(gl.float32)
        squares_at = row * NUM_SQUARES + first_out // PART
        gl.store(squares_ptr + squares_at, gl.sum(total * total, 1), mask=is_row & (first_out < out_features))
        norm = gl.load(norm_ptr + out, mask=is_out, other=0.0).to(gl.float32)
        gl.store(normed_ptr + out_at, (total * norm[None, :]).to(normed_ptr.dtype.element_ty), mask=inside)
    else:
        total *= _norm_factors(squares_ptr, eps, in_features, row, num_rows, NUM_SQUARES)[:, None]
        if HAS_BIAS:
            total += gl.load(bias_ptr + out, mask=is_out, other=0.0).to(gl.float32)[None, :]
        gl.store(out_ptr + out_at, total.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _multiply(
    summed,
    HALF: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    NUM_SQUARES: gl.constexpr,
    IS_GATED: gl.constexpr,
    ADDS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """What a multiplying group of warps does."""
    ring, given, partials_ptr, arrivals_ptr, sizes = summed
    out_ptr, squares_ptr, eps = given[0], given[1], given[5]
    num_rows, in_features, out_features, num_units = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if OVERLAPS:
        gdc_wait()
    if IS_GATED:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
        factors = _norm_factors(squares_ptr, eps, in_features, rows, num_rows, NUM_SQUARES)
        factors = gl.convert_layout(factors, gl.SliceLayout(0, layout))[None, :]
    used = 0
    for unit in range(gl.program_id(0), num_units, gl.num_programs(0)):
        _, turns = _cut(unit, in_features, SPLITS, PART if IS_GATED else 2 * PART)
        sums, others, used = _multiply_unit(ring, used, turns, HALF, ROWS, STAGES, IS_GATED)
        part = unit // SPLITS * 2 + HALF
        if IS_GATED:
            _store_gated(sums, others, factors, part * PART, out_ptr, num_rows, out_features)
        else:
            sums_ptr = partials_ptr + part * SPLITS * ROWS * PART
            feature = gl.arange(0, PART, gl.SliceLayout(1, layout))[:, None]
            row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :]
            at = (unit % SPLITS * ROWS + row) * PART + feature
            gl.store(sums_ptr + at, sums, mask=(row < num_rows) & (feature < PART))
            _barrier()
            if gl.atomic_add(arrivals_ptr + part, 1, sem="acq_rel") == SPLITS - 1:
                _add_up(given, sizes, sums_ptr, part * PART, SPLITS, ROWS, NUM_SQUARES, ADDS, HAS_BIAS)
                gl.store(arrivals_ptr + part, 0)


@gluon.jit(do_not_specialize=["num_rows", "num_units"])
def hopper_product_kernel(
    weight,  # a descriptor of copies of [PART, PART] of [out_features, in_features]; twice as many if IS_GATED
    x,  # of copies of [ROWS, PART] of [num_rows, in_features]
    out_ptr,  # [num_rows, out_features]
    partials_ptr,  # these four: see Scratch
    arrivals_ptr,
    squares_ptr,
    norm_ptr,  # [out_features], read if ADDS
    normed_ptr,  # out: [num_rows, out_features] if ADDS
    bias_ptr,  # [out_features], read if HAS_BIAS
    num_rows,
    in_features,
    out_features,
    num_units,  # tiles x SPLITS
    eps,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLITS: gl.constexpr,
    NUM_SQUARES: gl.constexpr,
    IS_GATED: gl.constexpr,
    ADDS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Grid: (programs,), each takes every units that many apart."""
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    DEEP: gl.constexpr = 1 if IS_GATED else 2
    weights = gl.allocate_shared_memory(dtype, [PARTS * STAGES, PART, PART], SWIZZLED)
    xs = gl.allocate_shared_memory(dtype, [DEEP * STAGES, ROWS, PART], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    ring = (weights, xs, full, free)
    given = (out_ptr, squares_ptr, norm_ptr, normed_ptr, bias_ptr, eps)
    sizes = (num_rows, in_features, out_features, num_units)
    summed = (ring, given, partials_ptr, arrivals_ptr, sizes)
    gl.warp_specialize(
        [
            (_multiply, (summed, 0, ROWS, STAGES, SPLITS, NUM_SQUARES, IS_GATED, ADDS, HAS_BIAS, OVERLAPS)),
            (_multiply, (summed, 1, ROWS, STAGES, SPLITS, NUM_SQUARES, IS_GATED, ADDS, HAS_BIAS, OVERLAPS)),
            (_copy, (weight, x, ring, sizes, ROWS, STAGES, SPLITS, IS_GATED, OVERLAPS)),
        ],
        [4, 1],
        [MULTIPLYING_REGISTERS, COPYING_REGISTERS],
    )
