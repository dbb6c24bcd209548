"""One tile of keys and values: what decode and prefill attention repeat along a sequence."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
MIN_DIM = 16
"""Head size of the smallest matrix product; smaller heads are padded to it."""
TILES_BYTES = 160 * 2**10
"""Shared memory for tiles of keys and values on their way: what a Hopper program has (227 KiB) less its other needs."""


def rows_per_tile(group: int, head_dim: int) -> int:
    """Rows of the matrix product of a program with many queries, one for each query and head of the group."""
    return 64 if head_dim > 128 else max(128, triton.next_power_of_2(group))


def stages_that_fit(padded_dim: int, keys_per_tile: int, stored_bytes: int, query_bytes: int) -> int:
    """How many tiles of keys and values may be on their way at once.

    The tile in use is converted, and so there twice, if elements of the pool are smaller than those of queries.
    """
    elements = 2 * keys_per_tile * padded_dim
    converted = elements * query_bytes if stored_bytes < query_bytes else 0
    return max(1, (TILES_BYTES - converted) // (elements * stored_bytes))


def scale_to_base_2(scale: float, soft_cap: float) -> float:
    """What scores are multiplied by before the exponential of base 2, or before they are capped."""
    return (scale / soft_cap if soft_cap else scale) * LOG2_E


def launch_constants(
    query: Tensor, cache: Tensor, soft_cap: float, keys_per_tile: int, num_stages: int
) -> dict[str, Any]:
    """What all kernels over a paged pool are compiled for, and as many stages of the pipeline as fit."""
    head_dim, num_kv_heads, block_size = query.shape[2], cache.shape[2], cache.shape[3]
    padded_dim = max(MIN_DIM, triton.next_power_of_2(head_dim))
    num_fitting = stages_that_fit(padded_dim, keys_per_tile, cache.element_size(), query.element_size())
    return {
        "NUM_HEADS": query.shape[1],
        "GROUP": query.shape[1] // num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "KEYS": keys_per_tile,
        "SOFT_CAP": soft_cap,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_stages": min(num_stages, num_fitting),
    }


@triton.jit
def as_multiplied(query, HAS_SCALES: tl.constexpr):
    """Queries of bfloat16 as float16 if the pool is e4m3, which becomes that in one instruction and bfloat16 in four.

    Exact for magnitudes from 2**-14 to 65504; what is beyond is cut off.
    """
    if HAS_SCALES and query.dtype == tl.bfloat16:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return query


@triton.jit
def load_tile(
    pool,  # pointer to one layer and KV head, strides of blocks and from keys to values
    block_ids,  # int32 [keys]: of the tile's positions
    keys_at,  # [keys]: positions of the tile
    first_key,  # keys before it hold nothing, used if HAS_WINDOW
    num_keys,  # keys from it on hold nothing
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_MASKED: tl.constexpr,  # some key holds nothing
    HAS_WINDOW: tl.constexpr,
):
    """Keys and values, [keys, head_dim]. Those that hold nothing are not read, for they may be NaN."""
    cache_ptr, block_stride, kv_stride = pool
    column = tl.arange(0, PADDED_DIM)
    lines = block_ids.to(tl.int64) * block_stride + keys_at % BLOCK_SIZE * HEAD_DIM  # passes 2**31 in large pools
    places = lines[:, None] + column[None, :]
    if IS_MASKED:
        readable = (keys_at < num_keys)[:, None]
        if HAS_WINDOW:
            readable = readable & (keys_at >= first_key)[:, None]
        if HEAD_DIM != PADDED_DIM:
            readable = readable & (column < HEAD_DIM)[None, :]
        keys = tl.load(cache_ptr + places, mask=readable, other=0.0)
        values = tl.load(cache_ptr + kv_stride + places, mask=readable, other=0.0)
    elif HEAD_DIM != PADDED_DIM:
        keys = tl.load(cache_ptr + places, mask=(column < HEAD_DIM)[None, :], other=0.0)
        values = tl.load(cache_ptr + kv_stride + places, mask=(column < HEAD_DIM)[None, :], other=0.0)
    else:
        keys = tl.load(cache_ptr + places)
        values = tl.load(cache_ptr + kv_stride + places)
    return keys, values


@triton.jit
def capped_scores(scores, scale, SOFT_CAP: tl.constexpr):
    """Scores, and what they are still to be multiplied by to be of base 2."""
    if SOFT_CAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = SOFT_CAP * 1.4426950408889634 * (1.0 - 2.0 / (tl.exp2(2.0 * scale * scores) + 1.0))
        scale = 1.0
    return scores, scale


@triton.jit
def attend_tile(
    query,  # [rows, head_dim]
    tile,  # keys and values [keys, head_dim]; e4m3 is converted to the type of queries, which is exact
    keys_at,  # [keys]: positions of the tile
    seen,  # [rows, 1]: first position that a row sees, used if HAS_WINDOW, and last
    sums,  # so far: largest score [rows], sum of weights [rows], weighted sum of values [rows, head_dim]
    scale,  # of scores, to base 2; before the cap if SOFT_CAP
    IS_MASKED: tl.constexpr,  # some row does not see some key
    HAS_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0: none
    PRECISION: tl.constexpr,
):
    """Scores, weights and their sums, carried on."""
    first_seen, last_seen = seen
    largest, total, mixed = sums
    keys, values = tile[0].to(query.dtype), tile[1].to(query.dtype)
    scores, factor = capped_scores(tl.dot(query, tl.trans(keys), input_precision=PRECISION), scale, SOFT_CAP)
    if IS_MASKED:
        is_seen = keys_at[None, :] <= last_seen
        if HAS_WINDOW:
            is_seen = is_seen & (keys_at[None, :] >= first_seen)
        scores = tl.where(is_seen, scores, float("-inf"))
    largest_now = tl.maximum(largest, tl.max(scores, 1) * factor)
    reference = largest_now
    if IS_MASKED:  # a row that has seen no key yet keeps -inf; -inf - -inf would be NaN
        reference = tl.where(largest_now == float("-inf"), 0.0, largest_now)
    weights = tl.exp2(scores * factor - reference[:, None])
    carried = tl.exp2(largest - reference)
    total = total * carried + tl.sum(weights, 1)
    mixed = mixed * carried[:, None]
    mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=PRECISION)
    return largest_now, total, mixed


@triton.jit
def attend_keys(
    query,  # [rows, head_dim]
    pool,  # see load_tile
    table_ptr,  # int32: blocks of the sequence
    begin,
    whole_until,  # tiles up to it are seen whole by every row
    end,
    seen,  # see attend_tile
    first_key,
    sums,
    scale,
    KEYS: tl.constexpr,  # of a tile
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,  # no tile is seen whole
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All tiles from `begin` to `end`, for many rows: see `attend_tile`."""
    largest, total, mixed = sums
    if not HAS_WINDOW:
        keys_at = begin + tl.arange(0, KEYS)
        block_ids = tl.load(table_ptr + keys_at // BLOCK_SIZE, mask=keys_at < end, other=0)
        for start in tl.range(begin, whole_until, KEYS):
            keys_at = start + tl.arange(0, KEYS)
            # The next tile's blocks are looked up a tile ahead: two dependent loads a turn would not overlap.
            next_at = keys_at + KEYS
            next_block_ids = tl.load(table_ptr + next_at // BLOCK_SIZE, mask=next_at < end, other=0)
            tile = load_tile(
                pool, block_ids, keys_at, first_key, end, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, False, HAS_WINDOW
            )
            largest, total, mixed = attend_tile(
                query, tile, keys_at, seen, (largest, total, mixed), scale, False, HAS_WINDOW, SOFT_CAP, PRECISION
            )
            block_ids = next_block_ids
    for start in tl.range(whole_until, end, KEYS):
        keys_at = start + tl.arange(0, KEYS)
        is_there = keys_at < end
        if HAS_WINDOW:
            is_there = is_there & (keys_at >= first_key)
        there = tl.load(table_ptr + keys_at // BLOCK_SIZE, mask=is_there, other=0)
        tile = load_tile(pool, there, keys_at, first_key, end, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, True, HAS_WINDOW)
        largest, total, mixed = attend_tile(
            query, tile, keys_at, seen, (largest, total, mixed), scale, True, HAS_WINDOW, SOFT_CAP, PRECISION
        )
    return largest, total, mixed
