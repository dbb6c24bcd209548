"""Attention of many queries at once, by what Hopper has beyond Triton's reach: written in Gluon.

Two warps copy keys and values of whole blocks into shared memory, two groups of four warps multiply 64 rows each.
While one group weighs its scores, the matrix units work for the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import structlog
import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from octavo.worker.kernels.hopper_copies import (
    COLUMNS,
    HEAD_DIM,
    KEYS,
    STAGES,
    SWIZZLED,
    TILE_ROWS,
    copy_tiles,
    count_turns,
    find_item,
    find_tiles,
    take_turn,
)

log = structlog.get_logger()

ROWS = gl.constexpr(64)
"""Of the matrix product of one group of warps."""
MULTIPLYING_REGISTERS = gl.constexpr(224)
COPYING_REGISTERS = gl.constexpr(56)
"""Of a thread. Both groups of warps that multiply, and the copying one, share what a multiprocessor has."""


@gluon.jit
def _locate(item, HALF: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """For each row of the product: its query, head, and whether there is such a query."""
    kv_head, _, _, _, first_query, query_len, _, _, _ = item
    line = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    query = first_query + line // GROUP
    is_query = (query < query_len) & (line < TILE_ROWS // GROUP * GROUP)
    return query, kv_head * GROUP + line % GROUP, is_query


@gluon.jit
def _load_query(query_ptr, rows, item, query_stride, HALF: gl.constexpr, GROUP: gl.constexpr, IS_PREFIX: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    query, head, is_query = _locate(item, HALF, GROUP, layout)
    token = item[2] + query
    if IS_PREFIX:
        token = gl.load(rows[0] + token, mask=is_query, other=0)
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    at = (token.to(gl.int64) * query_stride + head * HEAD_DIM)[:, None] + column[None, :]
    return gl.load(query_ptr + at, mask=is_query[:, None], other=0.0)


@gluon.jit
def _store(
    outs,
    item,
    largest,
    total,
    mixed,
    NUM_HEADS: gl.constexpr,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    IS_PREFIX: gl.constexpr,
):
    """The results of a prefill; of a prefix what a row goes on from."""
    layout: gl.constexpr = mixed.type.layout
    line_layout: gl.constexpr = gl.SliceLayout(1, layout)
    query, head, is_query = _locate(item, HALF, GROUP, layout)
    place = (item[3] + query).to(gl.int64) * NUM_HEADS + head
    column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, layout))
    at = (place * HEAD_DIM)[:, None] + column[None, :]
    if IS_PREFIX:
        partial_ptr, largest_ptr, total_ptr = outs
        gl.store(partial_ptr + at, mixed, mask=is_query[:, None])
        gl.store(largest_ptr + place, gl.convert_layout(largest, line_layout), mask=is_query)
        gl.store(total_ptr + place, gl.convert_layout(total, line_layout), mask=is_query)
    else:
        result = mixed * gl.convert_layout(1.0 / total, line_layout)[:, None]
        gl.store(outs[0] + at, result.to(outs[0].dtype.element_ty), mask=is_query[:, None])


@gluon.jit
def _score_tile(query, keys, stage, scores_layout: gl.constexpr, is_async: gl.constexpr):
    zero = gl.zeros([ROWS, KEYS], gl.float32, scores_layout)
    return warpgroup_mma(query, keys.index(stage).permute((1, 0)), zero, use_acc=False, is_async=is_async)


@gluon.jit
def _weigh(scores, tile, last_seen, largest, scale, IS_MASKED: gl.constexpr):
    """Weights of the keys, the largest score of each row so far, and what the sums so far are to be multiplied by."""
    if IS_MASKED:
        keys_at = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(keys_at[None, :] <= last_seen[:, None], scores, float("-inf"))
    largest_now = gl.maximum(largest, gl.max(scores, 1) * scale)
    return gl.exp2(scores * scale - largest_now[:, None]), largest_now, gl.exp2(largest - largest_now)


@gluon.jit
def _attend_tiles(asked, begin, end, sums, scores_layout: gl.constexpr, IS_MASKED: gl.constexpr):
    """The scores of each tile, and meanwhile the values of the one before."""
    query, tiles, barriers, used, last_seen, scale = asked
    weights, largest, total, mixed = sums
    keys, values = tiles
    keys_full, keys_free, values_full, values_free = barriers
    for tile in range(begin, end):
        now = used + tile
        stage = now % STAGES
        last_stage = (now - 1) % STAGES
        mbarrier.wait(keys_full.index(stage), now // STAGES & 1)
        scores = _score_tile(query, keys, stage, scores_layout, True)
        mbarrier.wait(values_full.index(last_stage), (now - 1) // STAGES & 1)
        mixed = warpgroup_mma(weights, values.index(last_stage), mixed, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(keys_free.index(stage))
        new_weights, largest, carried = _weigh(scores, tile, last_seen, largest, scale, IS_MASKED)
        total = total * carried + gl.sum(new_weights, 1)
        mixed, weights = warpgroup_mma_wait(0, deps=[mixed, weights])
        mbarrier.arrive(values_free.index(last_stage))
        mixed = mixed * gl.convert_layout(carried, gl.SliceLayout(1, mixed.type.layout))[:, None]
        weights = gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)
    return weights, largest, total, mixed


@gluon.jit
def _attend(given, query, NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HALF: gl.constexpr, IS_PREFIX: gl.constexpr):
    """What a multiplying group of warps does."""
    query_ptr, outs, rows, num_items, tiles, barriers, scale, query_stride = given
    keys, values = tiles
    keys_full, keys_free, values_full, values_free = barriers
    NUM_KV_HEADS: gl.constexpr = NUM_HEADS // GROUP
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    mixed_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, mixed_layout, 2)

    used = 0
    num_turns = count_turns(num_items)
    next_item = find_item(rows, take_turn(0), NUM_KV_HEADS, GROUP, IS_PREFIX)
    for turn in range(num_turns):
        item = next_item
        # Looked up a turn ahead, so that no query waits for its address. The last turn looks up its own again.
        next_item = find_item(rows, take_turn(gl.minimum(turn + 1, num_turns - 1)), NUM_KV_HEADS, GROUP, IS_PREFIX)
        _, _, _, _, first_query, query_len, num_seen, begin, end = item
        query.store(_load_query(query_ptr, rows, item, query_stride, HALF, GROUP, IS_PREFIX))
        fence_async_shared()
        first_tile, end_tile = find_tiles(begin, end)
        first_masked = gl.minimum(gl.maximum((num_seen + first_query) // KEYS, first_tile + 1), end_tile)
        asking, _, _ = _locate(item, HALF, GROUP, scores_layout)
        if IS_PREFIX:
            last_seen = gl.zeros_like(asking) + num_seen - 1
        else:
            last_seen = num_seen - 1 + gl.minimum(asking, query_len - 1)

        stage = used % STAGES
        mbarrier.wait(keys_full.index(stage), used // STAGES & 1)
        scores = _score_tile(query, keys, stage, scores_layout, False)
        mbarrier.arrive(keys_free.index(stage))
        largest = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
        new_weights, largest, _ = _weigh(scores, first_tile, last_seen, largest, scale, True)
        total = gl.sum(new_weights, 1)
        weights = gl.convert_layout(new_weights.to(query.dtype), weights_layout)
        mixed = gl.zeros([ROWS, HEAD_DIM], gl.float32, mixed_layout)
        used -= first_tile
        asked = (query, tiles, barriers, used, last_seen, scale)
        sums = (weights, largest, total, mixed)
        sums = _attend_tiles(asked, first_tile + 1, first_masked, sums, scores_layout, False)
        weights, largest, total, mixed = _attend_tiles(asked, first_masked, end_tile, sums, scores_layout, True)
        used += end_tile
        stage = (used - 1) % STAGES
        mbarrier.wait(values_full.index(stage), (used - 1) // STAGES & 1)
        mixed = warpgroup_mma(weights, values.index(stage), mixed)
        mbarrier.arrive(values_free.index(stage))
        _store(outs, item, largest, total, mixed, NUM_HEADS, HALF, GROUP, IS_PREFIX)


@gluon.jit
def attend_all(
    pool,  # one layer, from its first key on, as lines of HEAD_DIM: a descriptor of copies of [BLOCK_SIZE, COLUMNS]
    query_ptr,  # [num_tokens, num_heads, head_dim]
    outs,  # see _store
    tables_ptr,  # int32 [num_slots, max_blocks_per_seq]
    rows,  # see find_item
    num_items,  # tiles x KV heads
    scale,  # of scores, to base 2
    query_stride,
    table_stride,
    block_lines,  # lines from block to block
    kv_lines,  # lines from a key to its value
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,  # query heads of a KV head
    BLOCK_SIZE: gl.constexpr,
    IS_PREFIX: gl.constexpr,
):
    """A program stays on its multiprocessor and takes items in turns: the queries of a tile and one KV head."""
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    PIECES: gl.constexpr = STAGES * (KEYS // BLOCK_SIZE) * (HEAD_DIM // COLUMNS)
    key_pieces = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_SIZE, COLUMNS], SWIZZLED)
    value_pieces = gl.allocate_shared_memory(dtype, [PIECES, BLOCK_SIZE, COLUMNS], SWIZZLED)
    keys = key_pieces._reinterpret(dtype, [STAGES, KEYS, HEAD_DIM], SWIZZLED)
    values = value_pieces._reinterpret(dtype, [STAGES, KEYS, HEAD_DIM], SWIZZLED)
    query = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], SWIZZLED)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # The last one is the copying warp's own: values that it clears are full to others when it has done so.
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_full.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=2)
    mbarrier.init(values_full.index(STAGES), count=1)
    fence_async_shared()

    tiles = (keys, values)
    barriers = (keys_full, keys_free, values_full, values_free)
    given = (query_ptr, outs, rows, num_items, tiles, barriers, scale, query_stride)
    copied_keys = (pool, tables_ptr, rows, num_items, key_pieces, keys_full, keys_free)
    copied_values = (pool, tables_ptr, rows, num_items, value_pieces, values_full, values_free)
    lines = (table_stride, block_lines)
    gl.warp_specialize(
        [
            (_attend, (given, query.index(0), NUM_HEADS, GROUP, 0, IS_PREFIX)),
            (_attend, (given, query.index(1), NUM_HEADS, GROUP, 1, IS_PREFIX)),
            (copy_tiles, (copied_keys, lines, 0, NUM_HEADS // GROUP, GROUP, IS_PREFIX, False)),
            (copy_tiles, (copied_values, lines, kv_lines, NUM_HEADS // GROUP, GROUP, IS_PREFIX, True)),
        ],
        [4, 1, 1],
        [MULTIPLYING_REGISTERS, COPYING_REGISTERS, COPYING_REGISTERS],
    )


def computes(
    query: Tensor, cache: Tensor, *, window: int | None = None, soft_cap: float = 0.0, scales: Tensor | None = None
) -> bool:
    """Whether it attends by these queries to such a pool, if the installed Triton compiles it."""
    _, num_heads, head_dim = query.shape
    num_blocks, _, num_kv_heads, block_size, _ = cache.shape
    return (
        window is None
        and soft_cap == 0.0
        and scales is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and cache.dtype == query.dtype
        and head_dim == HEAD_DIM.value
        and num_heads // num_kv_heads <= TILE_ROWS.value
        and block_size in (8, 16, 32, 64, 128)
        and num_blocks * cache.stride(0) // head_dim < 2**31  # lines have 32-bit numbers
    )


def describe(layer: Tensor | MockTensor, num_lines: int, block_size: int) -> TensorDescriptor:
    """One layer of the pool as its lines."""
    line = HEAD_DIM.value
    return TensorDescriptor(layer, [num_lines, line], [line, 1], [block_size, COLUMNS.value], SWIZZLED.value)


def describe_cache(cache: Tensor) -> tuple[TensorDescriptor, int, int]:
    """Its lines, lines from block to block, and lines from a key to its value."""
    num_blocks, _, num_kv_heads, block_size, head_dim = cache.shape
    block_lines = cache.stride(0) // head_dim
    num_lines = (num_blocks - 1) * block_lines + 2 * num_kv_heads * block_size
    return describe(cache, num_lines, block_size), block_lines, cache.stride(1) // head_dim


def compiles(
    kernel: Any, name: str, pointers: Sequence[torch.dtype], num_heads: int, num_kv_heads: int, block_size: int
) -> bool:
    """Whether the installed Triton compiles a kernel for these types, queries first; a line in the log if not."""
    try:
        kernel.warmup(
            describe(MockTensor(pointers[0]), block_size, block_size),
            *pointers,
            1,
            1.0,
            *[HEAD_DIM.value] * 4,
            NUM_HEADS=num_heads,
            GROUP=num_heads // num_kv_heads,
            BLOCK_SIZE=block_size,
            num_warps=4,
            grid=(1,),
        )
    except Exception as error:  # the ways in which a changed compiler refuses a program have no type in common
        log.warning("attention without Gluon", kernel=name, triton=triton.__version__, error=repr(error))
        return False
    return True


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """As many programs as run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count
