"""Turns queries and keys by their positions and writes keys and values into their slots, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.worker.kernels.overlap import launch_options, let_next_begin, wait_for_previous

HEADS_PER_PROGRAM = 8


@triton.jit
def _store_kv_kernel(
    heads_ptr,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: query, key, value heads
    cos_sin_ptr,  # float32 [max_positions, head_dim]: cos of the half, then sin of the half
    positions_ptr,  # int32 [num_tokens]
    slot_mapping_ptr,  # int64 [num_tokens] |-> block_id * block_size + offset in the block; -1 is padding
    cache_ptr,  # one layer of the pool: [num_blocks, 2, num_kv_heads, block_size, head_dim]
    query_norm_ptr,  # [head_dim], read if HAS_NORM
    key_norm_ptr,  # [head_dim], read if HAS_NORM
    scales_ptr,  # float32 [2, num_kv_heads]: K, V; read if HAS_SCALES
    eps,
    block_stride,  # elements between blocks of the layer
    kv_stride,  # elements between K and V of a block
    head_stride,  # elements between heads of a block
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,  # half of head_dim, rounded up to a power of two
    HEADS: tl.constexpr,  # heads of one program
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,  # the pool is e4m3
    LARGEST: tl.constexpr,  # value of the pool's type
    OVERLAPS: tl.constexpr,
):
    """Queries are turned in place. Grid: (num_tokens, blocks of heads)."""
    let_next_begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pair = tl.arange(0, HALF)
    in_head = pair < HEAD_DIM // 2
    is_turned = in_head & (slot >= 0)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + pair, mask=is_turned, other=1.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HEAD_DIM // 2 + pair, mask=is_turned, other=0.0)[None, :]
    wait_for_previous(OVERLAPS)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        inside = (head[:, None] < NUM_HEADS + 2 * NUM_KV_HEADS) & in_head[None, :]
        is_query = head < NUM_HEADS
        is_value = head >= NUM_HEADS + NUM_KV_HEADS

        offsets = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head[:, None]) * HEAD_DIM + pair[None, :]
        first = tl.load(heads_ptr + offsets, mask=inside, other=0.0)
        second = tl.load(heads_ptr + offsets + HEAD_DIM // 2, mask=inside, other=0.0)
        x, y = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            scale = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)
            query_weight_x = tl.load(query_norm_ptr + pair, mask=in_head, other=0.0)[None, :]
            query_weight_y = tl.load(query_norm_ptr + HEAD_DIM // 2 + pair, mask=in_head, other=0.0)[None, :]
            key_weight_x = tl.load(key_norm_ptr + pair, mask=in_head, other=0.0)[None, :]
            key_weight_y = tl.load(key_norm_ptr + HEAD_DIM // 2 + pair, mask=in_head, other=0.0)[None, :]
            weight_x = tl.where(is_query[:, None], query_weight_x, key_weight_x)
            weight_y = tl.where(is_query[:, None], query_weight_y, key_weight_y)
            x = ((x * scale[:, None]).to(weight_x.dtype) * weight_x).to(tl.float32)
            y = ((y * scale[:, None]).to(weight_y.dtype) * weight_y).to(tl.float32)
        turned_first = tl.where(is_value[:, None], first, (x * cos - y * sin).to(first.dtype))
        turned_second = tl.where(is_value[:, None], second, (y * cos + x * sin).to(first.dtype))

        to_query = inside & is_query[:, None]
        tl.store(heads_ptr + offsets, turned_first, mask=to_query)
        tl.store(heads_ptr + offsets + HEAD_DIM // 2, turned_second, mask=to_query)
        to_cache = inside & (head[:, None] >= NUM_HEADS)
        kv_head = tl.where(is_value, head - NUM_HEADS - NUM_KV_HEADS, head - NUM_HEADS)
        line = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_DIM  # int64: passes 2**31 in large pools
        places = line + kv_head[:, None] * head_stride + tl.where(is_value, kv_stride, 0)[:, None] + pair[None, :]
        if HAS_SCALES:
            scale_at = tl.where(is_value, NUM_KV_HEADS, 0) + kv_head
            scale = tl.load(scales_ptr + scale_at, mask=(kv_head >= 0) & (kv_head < NUM_KV_HEADS), other=1.0)[:, None]
            first_stored = tl.clamp(turned_first.to(tl.float32) / scale, -LARGEST, LARGEST)
            second_stored = tl.clamp(turned_second.to(tl.float32) / scale, -LARGEST, LARGEST)
            tl.store(cache_ptr + places, first_stored.to(cache_ptr.dtype.element_ty), mask=to_cache)
            tl.store(cache_ptr + places + HEAD_DIM // 2, second_stored.to(cache_ptr.dtype.element_ty), mask=to_cache)
        else:
            tl.store(cache_ptr + places, turned_first, mask=to_cache)
            tl.store(cache_ptr + places + HEAD_DIM // 2, turned_second, mask=to_cache)


def store_kv(
    heads: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
    *,
    overlaps: bool = False,
) -> None:
    """Rotate the query heads in `heads` in place; write rotated keys, and values, to the slots of `cache`.

    `heads` is [num_tokens, num_heads + 2 * num_kv_heads, head_dim], dense. `cache` is one layer of the pool:
    [num_blocks, 2, num_kv_heads, block_size, head_dim]. `norms` are the weights by which query and key heads are
    normalised before. `scales`, float32 [2, num_kv_heads], are what K and V of an e4m3 pool are divided by; what does
    not fit then is stored as the type's largest value. Tokens of slot -1 are left as they are.
    `overlaps`: see kernels.overlap.
    """
    num_tokens, num_all_heads, head_dim = heads.shape
    _, _, num_kv_heads, block_size, _ = cache.shape
    query_norm, key_norm = norms or (heads, heads)
    grid = (num_tokens, triton.cdiv(num_all_heads, HEADS_PER_PROGRAM))
    _store_kv_kernel[grid](
        heads,
        cos_sin,
        positions,
        slot_mapping,
        cache,
        query_norm,
        key_norm,
        cos_sin if scales is None else scales,
        eps,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        NUM_HEADS=num_all_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        HEADS=HEADS_PER_PROGRAM,
        HAS_NORM=norms is not None,
        HAS_SCALES=scales is not None,
        LARGEST=torch.finfo(cache.dtype).max,
        OVERLAPS=overlaps,
        num_warps=2,
        **launch_options(overlaps),
    )
