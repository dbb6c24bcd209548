"""What a step needs on the device before the model runs, from what the host sent in one copy."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize=["num_entries"])
def _append_to_tables_kernel(
    tables_ptr,  # int32 [num_slots * max_blocks_per_seq]
    places_ptr,  # int32 [num_entries] |-> place in the tables
    block_ids_ptr,  # int32 [num_entries]
    num_entries,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    place = tl.load(places_ptr + entry, mask=inside, other=0)
    tl.store(tables_ptr + place, tl.load(block_ids_ptr + entry, mask=inside), mask=inside)


def append_to_tables(tables: Tensor, places: Tensor, block_ids: Tensor) -> None:
    """Write `block_ids` to the places of `tables`, all int32; a place is slot * max_blocks_per_seq + entry."""
    num_entries = len(places)
    _append_to_tables_kernel[(triton.cdiv(num_entries, BLOCK),)](tables, places, block_ids, num_entries, BLOCK=BLOCK)


@triton.jit(do_not_specialize=["num_tokens"])
def _locate_tokens_kernel(
    slots_ptr,  # int32 [num_tokens]; -1 is padding
    positions_ptr,  # int32 [num_tokens]
    sent_ptr,  # int32 [num_tokens]; -1: the token that the slot sampled last
    last_sampled_ptr,  # int32 [num_slots]
    tables_ptr,  # int32 [num_slots, max_blocks_per_seq]
    token_ids_ptr,  # out: int32 [num_tokens]
    slot_mapping_ptr,  # out: int64 [num_tokens]
    num_tokens,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=inside, other=-1).to(tl.int64)
    is_real = inside & (slot >= 0)
    position = tl.load(positions_ptr + token, mask=is_real, other=0)
    sent = tl.load(sent_ptr + token, mask=is_real, other=0)
    sampled = tl.load(last_sampled_ptr + slot, mask=is_real, other=0)
    tl.store(token_ids_ptr + token, tl.where(sent < 0, sampled, sent), mask=inside)
    block_id = tl.load(tables_ptr + slot * table_stride + position // BLOCK_SIZE, mask=is_real, other=0).to(tl.int64)
    mapped = tl.where(is_real, block_id * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slot_mapping_ptr + token, mapped, mask=inside)


def locate_tokens(
    slots: Tensor,
    positions: Tensor,
    sent: Tensor,
    last_sampled: Tensor,
    tables: Tensor,
    block_size: int,
    token_ids: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Fill `token_ids`, int32, and `slot_mapping`, int64, for the tokens of a step.

    `slots`, `positions` and `sent` are int32 [num_tokens]: a token of slot -1 is padding and gets token 0 and slot
    mapping -1; where `sent` is -1 the token is the one that the slot sampled last.
    """
    num_tokens = len(slots)
    _locate_tokens_kernel[(triton.cdiv(num_tokens, BLOCK),)](
        slots,
        positions,
        sent,
        last_sampled,
        tables,
        token_ids,
        slot_mapping,
        num_tokens,
        tables.stride(0),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
    )
