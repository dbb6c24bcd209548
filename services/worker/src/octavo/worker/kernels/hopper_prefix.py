"""Attention to prefixes that several decode rows share, on Hopper."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from octavo.worker.kernels.decode_rows import PrefixScratch, PrefixTiles
from octavo.worker.kernels.hopper_attention import (
    attend_all,
    compiles,
    computes,
    describe_cache,
    num_multiprocessors,
)
from octavo.worker.kernels.hopper_copies import TILE
from octavo.worker.kernels.online_softmax import LOG2_E


@gluon.jit(do_not_specialize=["max_members"])
def _hopper_prefix_kernel(
    pool,
    query_ptr,
    partial_ptr,  # these three: see PrefixScratch
    largest_ptr,
    total_ptr,
    tables_ptr,
    member_tokens_ptr,  # these two: see PrefixTiles
    tiles_ptr,
    max_members,
    scale,
    query_stride,
    table_stride,
    block_lines,
    kv_lines,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """See attend_all. Padding is no item."""
    num_tiles = gl.load(tiles_ptr + TILE - 2)
    attend_all(
        pool,
        query_ptr,
        (partial_ptr, largest_ptr, total_ptr),
        tables_ptr,
        (member_tokens_ptr, tiles_ptr, max_members),
        num_tiles * (NUM_HEADS // GROUP),
        scale,
        query_stride,
        table_stride,
        block_lines,
        kv_lines,
        NUM_HEADS,
        GROUP,
        BLOCK_SIZE,
        True,
    )


def serves(query: Tensor, cache: Tensor, *, soft_cap: float = 0.0, scales: Tensor | None = None) -> bool:
    """Whether `hopper_prefix` computes this, and the installed Triton compiles it."""
    _, _, num_kv_heads, block_size, _ = cache.shape
    return computes(query, cache, soft_cap=soft_cap, scales=scales) and _compiles(
        query.dtype, query.shape[1], num_kv_heads, block_size
    )


def hopper_prefix(
    query: Tensor, cache: Tensor, tables: Tensor, tiles: PrefixTiles, scratch: PrefixScratch, *, scale: float
) -> None:
    """Leave in `scratch` what `paged_prefix` does, where `serves` says so."""
    num_heads, num_kv_heads, block_size = query.shape[1], cache.shape[2], cache.shape[3]
    pool, block_lines, kv_lines = describe_cache(cache)
    num_programs = min(num_kv_heads * len(tiles.tiles), num_multiprocessors(query.device))
    _hopper_prefix_kernel[(num_programs,)](
        pool,
        query,
        scratch.partial,
        scratch.largest,
        scratch.total,
        tables,
        tiles.member_tokens,
        tiles.tiles,
        scratch.largest.shape[1],
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
    pointers = [dtype, *[torch.float32] * 3, *[torch.int32] * 3]
    return compiles(_hopper_prefix_kernel, "hopper_prefix", pointers, num_heads, num_kv_heads, block_size)
