"""Attention of rows with one query each over the paged pool, long contexts split over programs.

The kernel may also turn queries and the new keys by their positions and store the new keys and values, in the same
launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.kernels.decode_rows import ITEM, PREFIX_SHIFT, DecodeRows, DecodeScratch
from octavo.worker.kernels.online_softmax import (
    as_multiplied,
    attend_tile,
    capped_scores,
    launch_constants,
    load_tile,
    scale_to_base_2,
)
from octavo.worker.kernels.overlap import begin_after_previous, launch_options
from octavo.worker.kernels.partial_attention import after_prefix, merge_parts
from octavo.worker.kernels.turned_heads import cos_sin_at, turned_heads

MIN_GROUP = 16
"""Rows of the smallest matrix product; query heads that share a KV head are padded to it."""
MOST_MERGED = 16
"""Parts that a turn of a merge fetches, at most."""
MERGED_NUMBERS = 128
"""Of them in a thread's registers; half of it where a large group takes the rest."""
FEW_ITEMS = 48
"""Items up to which a program alone must hide the latency of memory."""
MANY_ITEMS = 512
"""Items beyond which their number does, so that more programs beside each other are better than larger ones."""
Tiling = tuple[int, int, int]
"""Keys of a turn, warps, turns whose keys and values are on their way. docs/kernels.md has the measurements that chose
these."""
FEW_TILING, TILING, MANY_TILING = (64, 2, 2), (32, 1, 3), (32, 1, 2)
FEW_STORING_TILING = (64, 4, 2)
"""With the work of `store_kv` beside it, which takes registers."""
FEW_WIDE_TILING, WIDE_TILING = (64, 4, 2), (32, 2, 3)
"""For queries of 32 bits, larger heads and larger groups, for which one warp has no registers."""
FEW_E4M3_TILING, E4M3_TILING = (128, 4, 2), (64, 2, 3)
"""For queries of 16 bits over a pool of e4m3, with heads of up to 128."""


@triton.jit
def _paged_decode_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]; if STORES key and value heads follow those of each token
    cache_ptr,  # one layer of the pool: [num_blocks, 2, num_kv_heads, block_size, head_dim]
    out_ptr,  # [num_tokens, num_heads, head_dim]
    tables_ptr,  # int32 [num_slots, max_blocks_per_seq]
    items_ptr,  # int32 [num_items, ITEM]: see DecodeRows
    partial_ptr,  # float32 [num_items, num_heads, head_dim]
    largest_ptr,  # float32 [num_items, num_heads]
    total_ptr,  # float32 [num_items, num_heads]
    arrivals_ptr,  # int32 [num_tokens, num_kv_heads], zero between launches
    prefix_partial_ptr,  # these three: see after_prefix, read if HAS_PREFIX
    prefix_largest_ptr,
    prefix_total_ptr,
    max_members,
    cos_sin_ptr,  # these five: see NewTokens, read if STORES
    slot_mapping_ptr,
    query_norm_ptr,
    key_norm_ptr,
    eps,
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
    WHOLE_GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # of one tile; a part is a multiple of it
    MERGED: tl.constexpr,
    ITEM: tl.constexpr,
    PREFIX_SHIFT: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    STORES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    LARGEST: tl.constexpr,  # value of the pool's type
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program attends to one part of one row's context for one KV head; the last of a row to end merges the parts.

    Grid: (NUM_KV_HEADS, num_items).
    """
    turn = tl.program_id(1)
    # Last are the longest items and the padding: the ones are to begin early, the others to make room early.
    item = turn if STORES else tl.num_programs(1) - 1 - turn
    kv_head = tl.program_id(0)
    token = tl.load(items_ptr + item * ITEM).to(tl.int64)
    slot = tl.load(items_ptr + item * ITEM + 1).to(tl.int64)
    begin = tl.load(items_ptr + item * ITEM + 2)
    end = tl.load(items_ptr + item * ITEM + 3)
    seq_len = tl.load(items_ptr + item * ITEM + 4)
    part = tl.load(items_ptr + item * ITEM + 5)
    num_parts = tl.load(items_ptr + item * ITEM + 6)

    member = tl.arange(0, PADDED_GROUP)
    column = tl.arange(0, PADDED_DIM)
    head = kv_head * GROUP + member
    is_head = member < GROUP
    is_real = is_head[:, None] & (column < HEAD_DIM)[None, :]
    first_seen = 0
    if HAS_WINDOW:
        first_seen = tl.maximum(seq_len - window, 0)
        begin = tl.maximum(begin, first_seen // KEYS * KEYS)
    if STORES:
        end = tl.minimum(end, seq_len - 1)
    end = tl.where(num_parts > 0, end, 0)
    last_seen = tl.full([PADDED_GROUP, 1], 0, tl.int32) + end - 1
    heads_ptr = cache_ptr + kv_head.to(tl.int64) * head_stride
    pool = (heads_ptr, block_stride, kv_stride)
    seen = (first_seen, last_seen)
    table_ptr = tables_ptr + slot * table_stride
    if STORES:
        # What earlier steps stored is on its way before the kernel waits for the one that computed the heads.
        keys_at = begin + tl.arange(0, KEYS)
        block_ids = tl.load(table_ptr + keys_at // BLOCK_SIZE, mask=keys_at < end, other=0)
        tile = load_tile(pool, block_ids, keys_at, first_seen, end, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, True, HAS_WINDOW)
        next_keys_at = keys_at + KEYS
        block_ids = tl.load(table_ptr + next_keys_at // BLOCK_SIZE, mask=next_keys_at < end, other=0)
        cos, sin = cos_sin_at(cos_sin_ptr, seq_len - 1, num_parts > 0, HEAD_DIM, PADDED_DIM)
        place = tl.load(slot_mapping_ptr + token, mask=num_parts > 0, other=0)
        begin_after_previous(OVERLAPS)
    elif (num_parts > 0) | (turn == 0):  # padding does not wait, but some program has to: see kernels.overlap
        begin_after_previous(OVERLAPS)
    if num_parts > 0:
        largest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        mixed = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
        key_scale = 1.0
        value_scale = 1.0
        if HAS_SCALES:
            key_scale = tl.load(scales_ptr + kv_head)
            value_scale = tl.load(scales_ptr + NUM_KV_HEADS + kv_head)
            scale *= key_scale
        query_at = token * query_stride + head * HEAD_DIM
        if STORES:
            query = turned_heads(
                query_ptr, query_at, is_head, cos, sin, query_norm_ptr, eps, HEAD_DIM, PADDED_DIM, HAS_NORM
            )
            query = as_multiplied(query, HAS_SCALES)
            key_at = token * query_stride + (NUM_HEADS + kv_head + tl.arange(0, 1)) * HEAD_DIM
            new_key = turned_heads(
                query_ptr, key_at, key_at >= 0, cos, sin, key_norm_ptr, eps, HEAD_DIM, PADDED_DIM, HAS_NORM
            )
            value_at = key_at[:, None] + NUM_KV_HEADS * HEAD_DIM + column[None, :]
            new_value = tl.load(query_ptr + value_at, mask=(column < HEAD_DIM)[None, :], other=0.0)
            if HAS_SCALES:
                new_key = tl.clamp(new_key.to(tl.float32) / key_scale, -LARGEST, LARGEST)
                new_value = tl.clamp(new_value.to(tl.float32) / value_scale, -LARGEST, LARGEST)
            new_key = new_key.to(cache_ptr.dtype.element_ty)
            new_value = new_value.to(cache_ptr.dtype.element_ty)
            is_last = part == num_parts - 1
            line = place // BLOCK_SIZE * block_stride + place % BLOCK_SIZE * HEAD_DIM  # passes 2**31 in large pools
            is_stored = (column < HEAD_DIM)[None, :] & is_last
            tl.store(heads_ptr + line + column[None, :], new_key, mask=is_stored)
            tl.store(heads_ptr + kv_stride + line + column[None, :], new_value, mask=is_stored)
            score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32), 1)
            score, factor = capped_scores(score, scale, SOFT_CAP)
            largest = tl.where(is_last, score * factor, largest)
            total += tl.where(is_last, 1.0, 0.0)
            mixed += tl.where(is_last, new_value.to(tl.float32), 0.0)
            largest, total, mixed = attend_tile(
                query, tile, keys_at, seen, (largest, total, mixed), scale, True, HAS_WINDOW, SOFT_CAP, PRECISION
            )
            begin += KEYS
        else:
            query = tl.load(query_ptr + query_at[:, None] + column[None, :], mask=is_real, other=0.0)
            query = as_multiplied(query, HAS_SCALES)
            if HAS_PREFIX:
                largest, total, mixed = after_prefix(
                    tl.where(part == 0, tl.load(items_ptr + item * ITEM + 7), 0),
                    prefix_partial_ptr,
                    prefix_largest_ptr,
                    prefix_total_ptr,
                    max_members,
                    head,
                    is_head,
                    NUM_HEADS,
                    HEAD_DIM,
                    PADDED_DIM,
                    PREFIX_SHIFT,
                )
        for start in tl.range(begin, end, KEYS):
            keys_at = start + tl.arange(0, KEYS)
            if STORES:  # the first turn's blocks were looked up before the wait, so each turn does so for the next
                next_keys_at = keys_at + KEYS
                next_block_ids = tl.load(table_ptr + next_keys_at // BLOCK_SIZE, mask=next_keys_at < end, other=0)
            else:
                block_ids = tl.load(table_ptr + keys_at // BLOCK_SIZE, mask=keys_at < end, other=0)
            tile = load_tile(
                pool, block_ids, keys_at, first_seen, end, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, True, HAS_WINDOW
            )
            largest, total, mixed = attend_tile(
                query, tile, keys_at, seen, (largest, total, mixed), scale, True, HAS_WINDOW, SOFT_CAP, PRECISION
            )
            if STORES:
                block_ids = next_block_ids

        out_at = token * NUM_HEADS * HEAD_DIM
        if num_parts == 1:
            result = mixed * (value_scale / total)[:, None]
            result_at = out_at + head[:, None] * HEAD_DIM + column[None, :]
            tl.store(out_ptr + result_at, result.to(out_ptr.dtype.element_ty), mask=is_real)
        else:
            at = item * NUM_HEADS + head
            tl.store(partial_ptr + at.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], mixed, mask=is_real)
            tl.store(largest_ptr + at, largest, mask=is_head)
            tl.store(total_ptr + at, total, mask=is_head)
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals_ptr + token * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
            if arrived == num_parts - 1:
                tl.store(arrivals_ptr + token * NUM_KV_HEADS + kv_head, 0)
                merge_parts(
                    partial_ptr,
                    largest_ptr,
                    total_ptr,
                    out_ptr,
                    item - part,
                    num_parts,
                    out_at + kv_head * GROUP * HEAD_DIM,
                    kv_head * GROUP,
                    value_scale,
                    NUM_HEADS,
                    GROUP,
                    WHOLE_GROUP,
                    HEAD_DIM,
                    PADDED_DIM,
                    MERGED,
                )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What `paged_decode` needs to do the work of `store_kv` as well."""

    cos_sin: Tensor  # float32 [max_positions, head_dim]: cos of the half, then sin of the half
    slot_mapping: Tensor  # int64 [num_tokens] |-> block_id * block_size + offset in the block
    norms: tuple[Tensor, Tensor] | None  # each [head_dim]: weights that normalise query and key heads
    eps: float


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
    new: NewTokens | None = None,
    tiling: Tiling | None = None,
    overlaps: bool = False,
) -> None:
    """Fill the rows' tokens of `out` [num_tokens, num_heads, head_dim], dense.

    `query` has the shape of `out`, its heads dense; `cache` is one layer of the pool; `tables` is int32
    [num_slots, max_blocks_per_seq]. A query sees the last `window` positions, or all. Scores are capped at +-`soft_cap`
    by tanh unless that is 0. `scales`, float32 [2, num_kv_heads], belong to an e4m3 pool.
    With `new`, `query` is the first part of [num_tokens, num_heads + 2 * num_kv_heads, head_dim], dense: query, key and
    value heads of each token, none of them turned or stored yet. Each row's token is stored then. Not for rows that go
    on from a prefix.
    `overlaps`: see kernels.overlap.
    """
    num_heads, num_kv_heads = query.shape[1], cache.shape[2]
    group = num_heads // num_kv_heads
    query_norm, key_norm = (query, query) if new is None or new.norms is None else new.norms
    keys_per_tile, num_warps, num_turns = tiling or _tiling(
        len(rows.items), query, group, stores=new is not None, converts=scales is not None
    )
    if new is None:  # a turn's blocks are looked up in that turn, which Triton does in as many stages before its copies
        constants = launch_constants(query, cache, soft_cap, keys_per_tile, num_turns)
        constants["num_stages"] = 2 * constants["num_stages"] + 1
    else:
        constants = launch_constants(query, cache, soft_cap, keys_per_tile, num_turns + 1)
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
        query if new is None else new.cos_sin,
        query if new is None else new.slot_mapping,
        query_norm,
        key_norm,
        0.0 if new is None else new.eps,
        query if scales is None else scales,
        scale_to_base_2(scale, soft_cap),
        query.stride(0),
        tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        window or 0,
        NUM_KV_HEADS=num_kv_heads,
        WHOLE_GROUP=(whole_group := triton.next_power_of_2(group)),
        PADDED_GROUP=max(MIN_GROUP, whole_group),
        MERGED=_merged_at_once(whole_group, constants["PADDED_DIM"], num_warps),
        ITEM=ITEM,
        PREFIX_SHIFT=PREFIX_SHIFT,
        HAS_PREFIX=rows.has_prefix,
        STORES=new is not None,
        HAS_NORM=new is not None and new.norms is not None,
        HAS_WINDOW=window is not None,
        HAS_SCALES=scales is not None,
        LARGEST=torch.finfo(cache.dtype).max,
        OVERLAPS=overlaps,
        num_warps=num_warps,
        **constants,
        **launch_options(overlaps),
    )


def _tiling(num_items: int, query: Tensor, group: int, *, stores: bool, converts: bool) -> Tiling:
    is_few = num_items <= FEW_ITEMS
    if converts and query.element_size() == 2 and query.shape[2] <= 128:
        return FEW_E4M3_TILING if is_few else E4M3_TILING
    if query.element_size() > 2 or query.shape[2] > 128 or group > MIN_GROUP:
        return FEW_WIDE_TILING if is_few else WIDE_TILING
    if is_few:
        return FEW_STORING_TILING if stores else FEW_TILING
    return MANY_TILING if num_items > MANY_ITEMS else TILING


def _merged_at_once(whole_group: int, padded_dim: int, num_warps: int) -> int:
    numbers = MERGED_NUMBERS if whole_group <= MIN_GROUP else MERGED_NUMBERS // 2
    return max(1, min(MOST_MERGED, numbers * 32 * num_warps // (whole_group * padded_dim)))
