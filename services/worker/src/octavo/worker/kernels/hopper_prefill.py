"""Attention of rows with many queries each, on Hopper."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.worker.kernels.hopper_attention import (
    attend_all,
    compiles,
    computes,
    describe_cache,
    num_multiprocessors,
)
from octavo.worker.kernels.online_softmax import LOG2_E
from octavo.worker.kernels.paged_prefill import PrefillRows


@gluon.jit(do_not_specialize=["num_items"])
def _hopper_prefill_kernel(
    pool,
    query_ptr,
    out_ptr,  # [num_tokens, num_heads, head_dim]
    tables_ptr,
    slots_ptr,  # these six: see PrefillRows
    tokens_ptr,
    query_lens_ptr,
    seq_lens_ptr,
    tile_rows_ptr,
    tile_parts_ptr,
    num_items,
    scale,
    query_stride,
    table_stride,
    block_lines,
    kv_lines,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """See attend_all."""
    rows = (slots_ptr, tokens_ptr, query_lens_ptr, seq_lens_ptr, tile_rows_ptr, tile_parts_ptr)
    attend_all(
        pool,
        query_ptr,
        (out_ptr,),
        tables_ptr,
        rows,
        num_items,
        scale,
        query_stride,
        table_stride,
        block_lines,
        kv_lines,
        NUM_HEADS,
        GROUP,
        BLOCK_SIZE,
        False,
    )


def serves(
    query: Tensor, cache: Tensor, *, window: int | None = None, soft_cap: float = 0.0, scales: Tensor | None = None
) -> bool:
    """Whether `hopper_prefill` computes this, and the installed Triton compiles it."""
    _, _, num_kv_heads, block_size, _ = cache.shape
    return computes(query, cache, window=window, soft_cap=soft_cap, scales=scales) and _compiles(
        query.dtype, query.shape[1], num_kv_heads, block_size
    )


def hopper_prefill(
    query: Tensor, cache: Tensor, tables: Tensor, rows: PrefillRows, out: Tensor, *, scale: float
) -> None:
    """Fill the rows' tokens of `out` as `paged_prefill` does, where `serves` says so."""
    num_heads, num_kv_heads, block_size = query.shape[1], cache.shape[2], cache.shape[3]
    pool, block_lines, kv_lines = describe_cache(cache)
    num_items = num_kv_heads * len(rows.tile_rows)
    _hopper_prefill_kernel[(min(num_items, num_multiprocessors(query.device)),)](
        pool,
        query,
        out,
        tables,
        rows.slots,
        rows.tokens,
        rows.query_lens,
        rows.seq_lens,
        rows.tile_rows,
        rows.tile_parts,
        num_items,
        scale * LOG2_E,
        query.stride(0),
        tables.stride(0),
        block_lines,
        kv_lines,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )


@functools.cache
def _compiles(dtype: torch.dtype, num_heads: int, num_kv_heads: int, block_size: int) -> bool:
    pointers = [dtype, dtype, *[torch.int32] * 7]
    return compiles(_hopper_prefill_kernel, "hopper_prefill", pointers, num_heads, num_kv_heads, block_size)
