"""Attention of rows with one query each over the paged pool, long contexts split over programs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.kernels.online_softmax import as_multiplied, attend_tile, stages_that_fit
from octavo.worker.kernels.overlap import begin_after_previous, launch_options

LOG2_E = math.log2(math.e)
MIN_GROUP = 16
"""Rows of the smallest matrix product; query heads that share a KV head are padded to it."""
MIN_DIM = 16
"""Head size of the smallest matrix product; smaller heads are padded to it."""
MERGED_AT_ONCE = 16
"""Partial results that one load fetches."""
FEW_ITEMS = 48
"""Items up to which a program alone must hide the latency of memory."""
Tiling = tuple[int, int, int]
"""Keys of a turn, warps, stages of the pipeline. docs/kernels.md has the measurements that chose these."""
FEW_TILING, MANY_TILING = (64, 4, 3), (32, 2, 4)
FEW_E4M3_TILING, MANY_E4M3_TILING = (128, 4, 3), (64, 2, 4)
"""For queries of 16 bits over a pool of e4m3, with heads of up to 128."""
ITEM = 8
"""Numbers of an item."""
PREFIX_SHIFT = 4
MAX_PREFIX_PARTS = 4
"""Parts that a shared prefix is split into."""


@triton.jit
def _paged_decode_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    cache_ptr,  # one layer of the pool: [num_blocks, 2, num_kv_heads, block_size, head_dim]
    out_ptr,  # [num_tokens, num_heads, head_dim]
    tables_ptr,  # int32 [num_slots, max_blocks_per_seq]
    items_ptr,  # int32 [num_items, ITEM]: see DecodeRows
    partial_ptr,  # float32 [num_items, num_heads, head_dim]
    largest_ptr,  # float32 [num_items, num_heads]
    total_ptr,  # float32 [num_items, num_heads]
    arrivals_ptr,  # int32 [num_tokens, num_kv_heads], zero between launches
    prefix_partial_ptr,  # float32 [MAX_PREFIX_PARTS, max_members, num_heads, head_dim], read if HAS_PREFIX
    prefix_largest_ptr,  # float32 [MAX_PREFIX_PARTS, max_members, num_heads]
    prefix_total_ptr,  # float32 [MAX_PREFIX_PARTS, max_members, num_heads]
    max_members,
    scales_ptr,  # float32 [2, num_kv_heads]: what K and V are to be multiplied by, read if HAS_SCALES
    scale,  # of scores, to base 2; before the cap if SOFT_CAP
    query_stride,  # elements between tokens of query
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    window,  # positions that a query sees, used if HAS_WINDOW
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    PADDED_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # of one tile; a part is a multiple of it
    MERGED: tl.constexpr,
    ITEM: tl.constexpr,
    PREFIX_SHIFT: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program attends to one part of one row's context for one KV head; the last of a row to end merges the parts.

    Grid: (NUM_KV_HEADS, num_items).
    """
    begin_after_previous(OVERLAPS)
    item = tl.program_id(1)
    kv_head = tl.program_id(0)
    token = tl.load(items_ptr + item * ITEM).to(tl.int64)
    slot = tl.load(items_ptr + item * ITEM + 1).to(tl.int64)
    begin = tl.load(items_ptr + item * ITEM + 2)
    end = tl.load(items_ptr + item * ITEM + 3)
    seq_len = tl.load(items_ptr + item * ITEM + 4)
    part = tl.load(items_ptr + item * ITEM + 5)
    num_parts = tl.load(items_ptr + item * ITEM + 6)
    if num_parts > 0:
        table_ptr = tables_ptr + slot * table_stride
        first_seen = 0
        if HAS_WINDOW:
            first_seen = tl.maximum(seq_len - window, 0)
            begin = tl.maximum(begin, first_seen // KEYS * KEYS)

        member = tl.arange(0, PADDED_GROUP)
        column = tl.arange(0, PADDED_DIM)
        head = kv_head * GROUP + member
        is_real = (member < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        query_at = token * query_stride + head[:, None] * HEAD_DIM + column[None, :]
        query = as_multiplied(tl.load(query_ptr + query_at, mask=is_real, other=0.0), HAS_SCALES)

        largest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        mixed = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
        if HAS_PREFIX:
            if part == 0:
                prefix = tl.load(items_ptr + item * ITEM + 7)
                for prefix_part in tl.range(0, prefix % (1 << PREFIX_SHIFT)):
                    state = prefix_part * max_members + (prefix >> PREFIX_SHIFT)
                    state_at = state.to(tl.int64) * NUM_HEADS + head
                    state_largest = tl.load(prefix_largest_ptr + state_at, mask=member < GROUP, other=0.0)
                    state_total = tl.load(prefix_total_ptr + state_at, mask=member < GROUP, other=1.0)
                    state_mixed = tl.load(
                        prefix_partial_ptr + state_at[:, None] * HEAD_DIM + column[None, :], mask=is_real, other=0.0
                    )
                    largest_now = tl.maximum(largest, state_largest)
                    carried = tl.exp2(largest - largest_now)
                    weight = tl.exp2(state_largest - largest_now)
                    total = total * carried + state_total * weight
                    mixed = mixed * carried[:, None] + state_mixed * weight[:, None]
                    largest = largest_now
        value_scale = 1.0
        if HAS_SCALES:
            scale *= tl.load(scales_ptr + kv_head)
            value_scale = tl.load(scales_ptr + NUM_KV_HEADS + kv_head)
        heads_ptr = cache_ptr + kv_head.to(tl.int64) * head_stride
        last_seen = tl.full([PADDED_GROUP, 1], 0, tl.int32) + seq_len - 1
        keys_at = begin + tl.arange(0, KEYS)
        block_ids = tl.load(table_ptr + keys_at // BLOCK_SIZE, mask=keys_at < end, other=0)
        for tile in tl.range(begin, end, KEYS):
            # The next tile's blocks are looked up a tile ahead: two dependent loads a turn would not overlap.
            next_keys_at = tile + KEYS + tl.arange(0, KEYS)
            next_block_ids = tl.load(table_ptr + next_keys_at // BLOCK_SIZE, mask=next_keys_at < end, other=0)
            largest, total, mixed = attend_tile(
                query,
                heads_ptr,
                block_ids,
                tile + tl.arange(0, KEYS),
                last_seen,
                first_seen,
                first_seen,
                end,
                largest,
                total,
                mixed,
                scale,
                block_stride,
                kv_stride,
                BLOCK_SIZE,
                HEAD_DIM,
                PADDED_DIM,
                True,
                HAS_WINDOW,
                SOFT_CAP,
                PRECISION,
            )
            block_ids = next_block_ids

        out_at = (token * NUM_HEADS + head[:, None]) * HEAD_DIM + column[None, :]
        if num_parts == 1:
            result = mixed * (value_scale / total)[:, None]
            tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=is_real)
        else:
            at = item * NUM_HEADS + head
            tl.store(partial_ptr + at.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], mixed, mask=is_real)
            tl.store(largest_ptr + at, largest, mask=member < GROUP)
            tl.store(total_ptr + at, total, mask=member < GROUP)
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + token * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
            if arrived == num_parts - 1:
                tl.store(arrivals_ptr + token * NUM_KV_HEADS + kv_head, 0)
                first_item = item - part
                for one in tl.range(0, GROUP):
                    merged_head = kv_head * GROUP + one
                    all_largest = tl.full([1], float("-inf"), tl.float32)
                    all_total = tl.zeros([1], tl.float32)
                    all_mixed = tl.zeros([PADDED_DIM], tl.float32)
                    for first_part in tl.range(0, num_parts, MERGED):
                        other = first_part + tl.arange(0, MERGED)
                        is_part = other < num_parts
                        other_at = (first_item + other) * NUM_HEADS + merged_head
                        other_largest = tl.load(
                            largest_ptr + other_at, mask=is_part, other=float("-inf"), cache_modifier=".cg"
                        )
                        other_total = tl.load(total_ptr + other_at, mask=is_part, other=0.0, cache_modifier=".cg")
                        other_mixed = tl.load(
                            partial_ptr + other_at.to(tl.int64)[:, None] * HEAD_DIM + column[None, :],
                            mask=is_part[:, None] & (column < HEAD_DIM)[None, :],
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        largest_now = tl.maximum(all_largest, tl.max(other_largest, 0))
                        reference = tl.where(largest_now == float("-inf"), 0.0, largest_now)
                        weights = tl.exp2(other_largest - reference)
                        carried = tl.exp2(all_largest - reference)
                        all_total = all_total * carried + tl.sum(other_total * weights, 0)
                        all_mixed = all_mixed * carried + tl.sum(other_mixed * weights[:, None], 0)
                        all_largest = largest_now
                    merged = (all_mixed * (value_scale / all_total)).to(out_ptr.dtype.element_ty)
                    merged_at = (token * NUM_HEADS + merged_head) * HEAD_DIM
                    tl.store(out_ptr + merged_at + column, merged, mask=column < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode rows of a step: int32 [num_items, ITEM] on the device.

    An item is a part of a row's context: (token of the step, slot, begin, end, length of the sequence, part,
    number of the row's parts, member * 2 ** PREFIX_SHIFT + number of prefix parts). Parts of a row are neighbours, in
    order; begin to end are positions. Part 0 goes on from what `paged_prefix` left of that member of a group. An item
    of 0 parts is padding.
    """

    items: Tensor
    has_prefix: bool = False
    """Some row goes on from a prefix."""


@dataclass(frozen=True, slots=True)
class PrefixScratch:
    """What attention to shared prefixes passes on to the rows that share them."""

    partial: Tensor  # float32 [MAX_PREFIX_PARTS, max_members, num_heads, head_dim]
    largest: Tensor  # float32 [MAX_PREFIX_PARTS, max_members, num_heads]
    total: Tensor  # float32 [MAX_PREFIX_PARTS, max_members, num_heads]


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """What parts of a row pass to the one that merges them. Shared by all launches of a stream."""

    partial: Tensor  # float32 [max_items, num_heads, head_dim]
    largest: Tensor  # float32 [max_items, num_heads]
    total: Tensor  # float32 [max_items, num_heads]
    arrivals: Tensor  # int32 [max_tokens, num_kv_heads], zero between launches
    prefix: PrefixScratch


def make_scratch(
    max_items: int,
    max_tokens: int,
    max_members: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> DecodeScratch:
    """Scratch for launches of up to this size; a member is a row that shares a prefix with others."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return DecodeScratch(
        partial=empty(max_items, num_heads, head_dim),
        largest=empty(max_items, num_heads),
        total=empty(max_items, num_heads),
        arrivals=torch.zeros((max_tokens, num_kv_heads), dtype=torch.int32, device=device),
        prefix=PrefixScratch(
            partial=empty(MAX_PREFIX_PARTS, max_members, num_heads, head_dim),
            largest=empty(MAX_PREFIX_PARTS, max_members, num_heads),
            total=empty(MAX_PREFIX_PARTS, max_members, num_heads),
        ),
    )


def paged_decode(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    rows: DecodeRows,
    scratch: DecodeScratch,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    scales: Tensor | None = None,
    tiling: Tiling | None = None,
    overlaps: bool = False,
) -> None:
    """Fill the rows' tokens of `out` [num_tokens, num_heads, head_dim], dense.

    `query` has the shape of `out`, its heads dense; `cache` is one layer of the pool; `tables` is int32
    [num_slots, max_blocks_per_seq]. A query sees the last `window` positions, or all. Scores are capped at +-`soft_cap`
    by tanh unless that is 0. `scales`, float32 [2, num_kv_heads], belong to an e4m3 pool.
    `overlaps`: see kernels.overlap.
    """
    _, num_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    group = num_heads // num_kv_heads
    scores_scale = scale / soft_cap if soft_cap else scale
    padded_dim = max(MIN_DIM, triton.next_power_of_2(head_dim))
    keys_per_tile, num_warps, num_stages = tiling or _tiling(
        len(rows.items) <= FEW_ITEMS, scales is not None and query.element_size() == 2 and padded_dim <= 128
    )
    _paged_decode_kernel[(num_kv_heads, len(rows.items))](
        query,
        cache,
        out,
        tables,
        rows.items,
        scratch.partial,
        scratch.largest,
        scratch.total,
        scratch.arrivals,
        scratch.prefix.partial,
        scratch.prefix.largest,
        scratch.prefix.total,
        scratch.prefix.largest.shape[1],
        query if scales is None else scales,
        scores_scale * LOG2_E,
        query.stride(0),
        tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        window or 0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        PADDED_GROUP=max(MIN_GROUP, triton.next_power_of_2(group)),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        KEYS=keys_per_tile,
        MERGED=MERGED_AT_ONCE,
        ITEM=ITEM,
        PREFIX_SHIFT=PREFIX_SHIFT,
        HAS_PREFIX=rows.has_prefix,
        HAS_WINDOW=window is not None,
        HAS_SCALES=scales is not None,
        SOFT_CAP=soft_cap,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        OVERLAPS=overlaps,
        num_warps=num_warps,
        num_stages=min(
            num_stages, stages_that_fit(padded_dim, keys_per_tile, cache.element_size(), query.element_size())
        ),
        **launch_options(overlaps),
    )


def _tiling(is_few: bool, converts_e4m3: bool) -> Tiling:
    if converts_e4m3:
        return FEW_E4M3_TILING if is_few else MANY_E4M3_TILING
    return FEW_TILING if is_few else MANY_TILING
