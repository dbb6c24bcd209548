"""Attention to parts of a context, each (largest score, sum of weights, weighted values): how they become one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def after_prefix(
    prefix,  # member of a group, number of prefix parts: see DecodeRows; no parts: nothing has been attended to
    partial_ptr,  # float32 [MAX_PREFIX_PARTS, max_members, num_heads, head_dim]
    largest_ptr,  # float32 [MAX_PREFIX_PARTS, max_members, num_heads]
    total_ptr,  # float32 [MAX_PREFIX_PARTS, max_members, num_heads]
    max_members,
    head,
    is_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PREFIX_SHIFT: tl.constexpr,
):
    """What `paged_prefix` left for a row. Most rows have one part, which nothing here has to wait for."""
    num_parts = prefix % (1 << PREFIX_SHIFT)
    member = prefix >> PREFIX_SHIFT
    column = tl.arange(0, PADDED_DIM)
    is_left = is_head & (num_parts > 0)
    is_number = is_left[:, None] & (column < HEAD_DIM)[None, :]
    at = member.to(tl.int64) * NUM_HEADS + head
    largest = tl.load(largest_ptr + at, mask=is_left, other=float("-inf"))
    total = tl.load(total_ptr + at, mask=is_left, other=0.0)
    mixed = tl.load(partial_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=is_number, other=0.0)
    for part in tl.range(1, num_parts):
        at = (part * max_members + member).to(tl.int64) * NUM_HEADS + head
        part_largest = tl.load(largest_ptr + at, mask=is_left, other=0.0)
        part_total = tl.load(total_ptr + at, mask=is_left, other=0.0)
        part_mixed = tl.load(partial_ptr + at[:, None] * HEAD_DIM + column[None, :], mask=is_number, other=0.0)
        largest_now = tl.maximum(largest, part_largest)
        carried = tl.exp2(largest - largest_now)
        weight = tl.exp2(part_largest - largest_now)
        total = total * carried + part_total * weight
        mixed = mixed * carried[:, None] + part_mixed * weight[:, None]
        largest = largest_now
    return largest, total, mixed


@triton.jit
def merge_parts(
    partial_ptr,
    largest_ptr,
    total_ptr,
    out_ptr,
    first_item,
    num_parts,
    out_at,  # of the first head of the group
    first_head,
    value_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE_GROUP: tl.constexpr,  # the power of two that holds GROUP
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MERGED: tl.constexpr,  # parts that one turn fetches
):
    """The result of a row from what its parts left: all heads at once, so that each thread has columns of its own."""
    member = tl.arange(0, WHOLE_GROUP)
    column = tl.arange(0, PADDED_DIM)
    is_member = member < GROUP
    is_real = is_member[:, None] & (column < HEAD_DIM)[None, :]
    all_largest = tl.full([WHOLE_GROUP], float("-inf"), tl.float32)
    all_total = tl.zeros([WHOLE_GROUP], tl.float32)
    all_mixed = tl.zeros([WHOLE_GROUP, PADDED_DIM], tl.float32)
    for first_part in tl.range(0, num_parts, MERGED):
        part = first_part + tl.arange(0, MERGED)
        at = (first_item + part)[:, None] * NUM_HEADS + first_head + member[None, :]
        is_part = (part < num_parts)[:, None] & is_member[None, :]
        part_largest = tl.load(largest_ptr + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(total_ptr + at, mask=is_part, other=0.0, cache_modifier=".cg")
        part_mixed = tl.load(
            partial_ptr + at.to(tl.int64)[:, :, None] * HEAD_DIM + column[None, None, :],
            mask=(part < num_parts)[:, None, None] & is_real[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        largest_now = tl.maximum(all_largest, tl.max(part_largest, 0))
        reference = tl.where(largest_now == float("-inf"), 0.0, largest_now)
        weights = tl.exp2(part_largest - reference[None, :])
        carried = tl.exp2(all_largest - reference)
        all_total = all_total * carried + tl.sum(part_total * weights, 0)
        all_mixed = all_mixed * carried[:, None] + tl.sum(part_mixed * weights[:, :, None], 0)
        all_largest = largest_now
    factor = value_scale / tl.where(is_member, all_total, 1.0)
    merged = (all_mixed * factor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at + member[:, None] * HEAD_DIM + column[None, :], merged, mask=is_real)
