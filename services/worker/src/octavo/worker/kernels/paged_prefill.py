"""Attention of rows with many queries each over the paged pool."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.kernels.online_softmax import (
    as_multiplied,
    attend_keys,
    launch_constants,
    rows_per_tile,
    scale_to_base_2,
)


@triton.jit
def _paged_prefill_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    cache_ptr,  # one layer of the pool: [num_blocks, 2, num_kv_heads, block_size, head_dim]
    out_ptr,  # [num_tokens, num_heads, head_dim]
    tables_ptr,  # int32 [num_slots, max_blocks_per_seq]
    row_slots_ptr,  # int32 [num_rows]
    row_tokens_ptr,  # int32 [num_rows] |-> the row's first token of the step
    row_query_lens_ptr,  # int32 [num_rows]
    row_lens_ptr,  # int32 [num_rows], this step's tokens included
    tile_rows_ptr,  # int32 [num_tiles] |-> row
    tile_parts_ptr,  # int32 [num_tiles] |-> part of the row's queries
    scales_ptr,  # float32 [2, num_kv_heads]: what K and V are to be multiplied by, read if HAS_SCALES
    scale,  # of scores, to base 2; before the cap if SOFT_CAP
    query_stride,
    table_stride,
    block_stride,
    kv_stride,
    head_stride,
    window,  # positions that a query sees, used if HAS_WINDOW
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # of the matrix product: queries of a tile, each with all heads of its group
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program attends for ROWS // GROUP neighbouring queries and one KV head. Grid: (NUM_KV_HEADS, num_tiles)."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tile_rows_ptr + tile)
    part = tl.load(tile_parts_ptr + tile)
    query_len = tl.load(row_query_lens_ptr + row)
    seq_len = tl.load(row_lens_ptr + row)
    table_ptr = tables_ptr + tl.load(row_slots_ptr + row).to(tl.int64) * table_stride

    QUERIES: tl.constexpr = ROWS // GROUP
    line = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED_DIM)
    first_query = part * QUERIES
    query_index = first_query + line // GROUP
    head = kv_head * GROUP + line % GROUP
    is_query = (query_index < query_len) & (line < QUERIES * GROUP)
    is_real = is_query[:, None] & (column < HEAD_DIM)[None, :]
    token = tl.load(row_tokens_ptr + row).to(tl.int64) + query_index
    query_at = token[:, None] * query_stride + (head * HEAD_DIM)[:, None] + column[None, :]
    query = as_multiplied(tl.load(query_ptr + query_at, mask=is_real, other=0.0), HAS_SCALES)

    context = seq_len - query_len  # computed by earlier steps
    last_seen = context + tl.minimum(query_index, query_len - 1)
    end = context + tl.minimum(first_query + QUERIES, query_len)
    first_seen = tl.full([ROWS, 1], 0, tl.int32)
    first_key = 0
    begin = 0
    if HAS_WINDOW:
        first_seen = (last_seen - window + 1)[:, None]
        first_key = tl.maximum(context + first_query - window + 1, 0)
        begin = first_key // KEYS * KEYS
    last_seen = last_seen[:, None]

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    value_scale = 1.0
    if HAS_SCALES:
        scale *= tl.load(scales_ptr + kv_head)
        value_scale = tl.load(scales_ptr + tl.num_programs(0) + kv_head)
    heads_ptr = cache_ptr + kv_head.to(tl.int64) * head_stride
    whole_until = begin if HAS_WINDOW else (context + first_query + 1) // KEYS * KEYS
    largest, total, mixed = attend_keys(
        query,
        (heads_ptr, block_stride, kv_stride),
        table_ptr,
        begin,
        whole_until,
        end,
        (first_seen, last_seen),
        first_key,
        (largest, total, mixed),
        scale,
        KEYS,
        BLOCK_SIZE,
        HEAD_DIM,
        PADDED_DIM,
        HAS_WINDOW,
        SOFT_CAP,
        PRECISION,
    )
    result = (mixed * (value_scale / total)[:, None]).to(out_ptr.dtype.element_ty)
    out_at = (token * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + out_at, result, mask=is_real)


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """The prefill rows of a step, on the device, all int32."""

    slots: Tensor  # [num_rows]
    tokens: Tensor  # [num_rows] |-> the row's first token of the step
    query_lens: Tensor  # [num_rows]
    seq_lens: Tensor  # [num_rows]
    tile_rows: Tensor  # [num_tiles] |-> row
    tile_parts: Tensor  # [num_tiles] |-> part of the row's queries, each of `queries_per_tile`


def queries_per_tile(group: int, head_dim: int) -> int:
    """Queries that one program computes."""
    return rows_per_tile(group, head_dim) // group


def paged_prefill(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    rows: PrefillRows,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    scales: Tensor | None = None,
    keys_per_tile: int = 64,
    num_warps: int = 8,
    num_stages: int = 4,
) -> None:
    """Fill the rows' tokens of `out`, by the rules of `paged_decode`; a query sees positions up to its own."""
    _, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    _paged_prefill_kernel[(num_kv_heads, len(rows.tile_rows))](
        query,
        cache,
        out,
        tables,
        rows.slots,
        rows.tokens,
        rows.query_lens,
        rows.seq_lens,
        rows.tile_rows,
        rows.tile_parts,
        query if scales is None else scales,
        scale_to_base_2(scale, soft_cap),
        query.stride(0),
        tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        window or 0,
        ROWS=rows_per_tile(num_heads // num_kv_heads, head_dim),
        HAS_WINDOW=window is not None,
        HAS_SCALES=scales is not None,
        num_warps=num_warps,
        **launch_constants(query, cache, soft_cap, keys_per_tile, num_stages),
    )
