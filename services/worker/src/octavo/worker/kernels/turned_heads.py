"""Heads of queries and keys, normalised and turned by their positions, for kernels that go on with them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cos_sin_at(
    cos_sin_ptr,  # float32 [max_positions, head_dim]: cos of the half, then sin of the half
    position,
    is_there,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """What `turned_heads` multiplies each number of a head and its partner in the other half by, both [PADDED_DIM]."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, PADDED_DIM)
    at = cos_sin_ptr + position.to(tl.int64) * HEAD_DIM + column % HALF
    inside = (column < HEAD_DIM) & is_there
    cos = tl.load(at, mask=inside, other=1.0)
    sin = tl.load(at + HALF, mask=inside, other=0.0)
    return cos, tl.where(column < HALF, -sin, sin)


@triton.jit
def turned_heads(
    heads_ptr,
    starts,  # [heads] |-> the head's first number
    is_head,  # [heads]
    cos,
    sin,
    norm_ptr,  # [head_dim], read if HAS_NORM
    eps,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """[heads, PADDED_DIM], rounded to the type of the heads."""
    column = tl.arange(0, PADDED_DIM)
    partner = (column + HEAD_DIM // 2) % HEAD_DIM
    inside = is_head[:, None] & (column < HEAD_DIM)[None, :]
    x = tl.load(heads_ptr + starts[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    y = tl.load(heads_ptr + starts[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
        weight = tl.load(norm_ptr + column, mask=column < HEAD_DIM, other=0.0)[None, :]
        partner_weight = tl.load(norm_ptr + partner, mask=column < HEAD_DIM, other=0.0)[None, :]
        x = ((x * scale[:, None]).to(weight.dtype) * weight).to(tl.float32)
        y = ((y * scale[:, None]).to(weight.dtype) * partner_weight).to(tl.float32)
    return (x * cos[None, :] + y * sin[None, :]).to(heads_ptr.dtype.element_ty)
