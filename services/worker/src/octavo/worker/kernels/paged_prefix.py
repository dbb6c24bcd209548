"""Attention to a prefix that several decode rows share: its blocks are read once for all of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.kernels.decode_rows import TILE, PrefixScratch, PrefixTiles
from octavo.worker.kernels.online_softmax import (
    as_multiplied,
    attend_keys,
    launch_constants,
    rows_per_tile,
    scale_to_base_2,
)


@triton.jit
def _paged_prefix_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    cache_ptr,  # one layer of the pool: [num_blocks, 2, num_kv_heads, block_size, head_dim]
    tables_ptr,  # int32 [num_slots, max_blocks_per_seq]
    member_tokens_ptr,  # int32 [num_members] |-> token of the step
    tiles_ptr,  # int32 [num_tiles, TILE]: see PrefixTiles
    partial_ptr,  # out: float32 [MAX_PREFIX_PARTS, max_members, num_heads, head_dim]
    largest_ptr,  # out: float32 [MAX_PREFIX_PARTS, max_members, num_heads]
    total_ptr,  # out: float32 [MAX_PREFIX_PARTS, max_members, num_heads]
    max_members,
    scales_ptr,  # float32 [2, num_kv_heads]: what K and V are to be multiplied by; that of K is read if HAS_SCALES
    scale,  # of scores, to base 2; before the cap if SOFT_CAP
    query_stride,
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # of the matrix product: members of a tile, each with all heads of its group
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program attends for up to ROWS // GROUP members and one KV head. Grid: (NUM_KV_HEADS, num_tiles)."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    first_member = tl.load(tiles_ptr + tile * TILE)
    num_members = tl.load(tiles_ptr + tile * TILE + 1)
    slot = tl.load(tiles_ptr + tile * TILE + 2).to(tl.int64)
    begin = tl.load(tiles_ptr + tile * TILE + 3)
    end = tl.load(tiles_ptr + tile * TILE + 4)
    part = tl.load(tiles_ptr + tile * TILE + 5)
    if num_members > 0:
        table_ptr = tables_ptr + slot * table_stride
        line = tl.arange(0, ROWS)
        column = tl.arange(0, PADDED_DIM)
        is_member = line // GROUP < num_members
        is_real = is_member[:, None] & (column < HEAD_DIM)[None, :]
        member = first_member + line // GROUP
        head = kv_head * GROUP + line % GROUP
        token = tl.load(member_tokens_ptr + member, mask=is_member, other=0).to(tl.int64)
        query_at = token[:, None] * query_stride + (head * HEAD_DIM)[:, None] + column[None, :]
        query = as_multiplied(tl.load(query_ptr + query_at, mask=is_real, other=0.0), HAS_SCALES)

        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        if HAS_SCALES:
            scale *= tl.load(scales_ptr + kv_head)
        heads_ptr = cache_ptr + kv_head.to(tl.int64) * head_stride
        last_seen = tl.full([ROWS, 1], 0, tl.int32) + end - 1
        whole_until = begin + (end - begin) // KEYS * KEYS
        largest, total, mixed = attend_keys(
            query,
            (heads_ptr, block_stride, kv_stride),
            table_ptr,
            begin,
            whole_until,
            end,
            (0, last_seen),
            0,
            (largest, total, mixed),
            scale,
            KEYS,
            BLOCK_SIZE,
            HEAD_DIM,
            PADDED_DIM,
            False,
            SOFT_CAP,
            PRECISION,
        )
        at = (part * max_members + member).to(tl.int64) * NUM_HEADS + head
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + column[None, :], mixed, mask=is_real)
        tl.store(largest_ptr + at, largest, mask=is_member)
        tl.store(total_ptr + at, total, mask=is_member)


def members_per_tile(group: int, head_dim: int) -> int:
    """Rows of a group that one program computes."""
    return rows_per_tile(group, head_dim) // group


def paged_prefix(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    tiles: PrefixTiles,
    scratch: PrefixScratch,
    *,
    scale: float,
    soft_cap: float = 0.0,
    scales: Tensor | None = None,
    keys_per_tile: int = 64,
    num_warps: int = 8,
    num_stages: int = 4,
) -> None:
    """Attend to the prefixes for all members of their groups. `paged_decode` goes on from what is left in `scratch`.

    Not for layers with a sliding window, where members see different parts of the prefix.
    """
    _, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    if query.dtype == torch.float32:
        keys_per_tile = min(keys_per_tile, 16)  # no matrix units: each product is unrolled, a large tile for minutes
    _paged_prefix_kernel[(num_kv_heads, len(tiles.tiles))](
        query,
        cache,
        tables,
        tiles.member_tokens,
        tiles.tiles,
        scratch.partial,
        scratch.largest,
        scratch.total,
        scratch.largest.shape[1],
        query if scales is None else scales,
        scale_to_base_2(scale, soft_cap),
        query.stride(0),
        tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        ROWS=rows_per_tile(num_heads // num_kv_heads, head_dim),
        TILE=TILE,
        HAS_SCALES=scales is not None,
        num_warps=num_warps,
        **launch_constants(query, cache, soft_cap, keys_per_tile, num_stages),
    )
