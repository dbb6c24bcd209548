"""The rows of one query each of a step, as their kernels get them, and the memory in which these pass things on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ITEM = 8
"""Numbers of an item."""
TILE = 8
"""Numbers of a tile."""
PREFIX_SHIFT = 4
MAX_PREFIX_PARTS = 4
"""Parts that a shared prefix is split into."""


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
class PrefixTiles:
    """The shared prefixes of a step, on the device, int32.

    A tile is some members of a group, and a part of the prefix: (first member, number of members, slot whose table
    leads to the prefix, begin, end, part, number of tiles). Members of a tile are neighbours; 0 members, and 0 tiles in
    the first one, are padding.
    """

    member_tokens: Tensor  # [num_members] |-> token of the step
    tiles: Tensor  # [num_tiles, TILE]


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
