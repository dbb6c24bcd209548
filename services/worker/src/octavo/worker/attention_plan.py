"""How attention of a step is cut into pieces of even work. Host side; numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.worker.attention import Int64Array

WHOLE_PART = 384
"""Tokens of context up to which a row is not cut: to merge its parts would take longer than to read it."""
MIN_PART = 256
"""Tokens of context below which a part is not worth a program of its own."""
MIN_FINE_PART = 128
"""The same while all items fit on the GPU at once, for more than FEW_ROWS rows, whose programs are smaller."""
SPARE_PROGRAMS = 512
"""Programs, of items times KV heads, that long contexts may add to a launch; about four for each multiprocessor."""
FEW_ROWS = 4
FEW_SPARE_PROGRAMS = 256
"""The same for up to FEW_ROWS rows, whose programs are larger: all run at once."""
PREFIX_PROGRAMS = 132
"""Programs, of tiles times KV heads, up to which a shared prefix is split: one for each multiprocessor."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Decode rows that share leading tokens."""

    rows: Sequence[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Shared prefixes cut into tiles."""

    member_rows: Int64Array  # [num_members] |-> row
    tiles: Int64Array  # [num_tiles, 8], see kernels.decode_rows.PrefixTiles; the slot's place holds a row
    lens: Int64Array  # [num_rows]: tokens of the prefix, 0 for rows that share none
    codes: Int64Array  # [num_rows]: the last number of a decode item


def spare_items(num_rows: int, num_kv_heads: int) -> int:
    """Items beyond one per row, which long contexts are split into. More of them cost more in merges than they even."""
    return max(16, (FEW_SPARE_PROGRAMS if num_rows <= FEW_ROWS else SPARE_PROGRAMS) // num_kv_heads)


def decode_items(
    tokens: Int64Array, slots: Int64Array, seq_lens: Int64Array, num_spare: int, prefixes: PrefixPlan | None = None
) -> Int64Array:
    """[num_items, 8], at most one per row and `num_spare` more: see kernels.decode_rows.DecodeRows.

    Contexts, without what is left to a shared prefix, stay whole or are cut into parts of one length. The longest are
    last, with which the kernel begins: one that began when the others end would keep the GPU waiting.
    """
    starts = np.zeros_like(seq_lens) if prefixes is None else prefixes.lens
    own_lens = seq_lens - starts
    part_len, num_parts = _cut_rows(own_lens, num_spare, MIN_FINE_PART)
    if len(seq_lens) <= FEW_ROWS or num_parts.sum() > num_spare:
        part_len, num_parts = _cut_rows(own_lens, num_spare, MIN_PART)
    order = np.argsort(own_lens, kind="stable")
    parts_in_order = num_parts[order]
    rows = np.repeat(order, parts_in_order)
    parts = np.arange(len(rows)) - np.repeat(np.cumsum(parts_in_order) - parts_in_order, parts_in_order)
    begins = starts[rows] + parts * part_len
    items = np.zeros((len(rows), 8), dtype=np.int64)
    items[:, 0] = tokens[rows]
    items[:, 1] = slots[rows]
    items[:, 2] = begins
    items[:, 3] = np.where(parts == num_parts[rows] - 1, seq_lens[rows], begins + part_len)
    items[:, 4] = seq_lens[rows]
    items[:, 5] = parts
    items[:, 6] = num_parts[rows]
    if prefixes is not None:
        items[:, 7] = prefixes.codes[rows]
    return items


def _cut_rows(own_lens: Int64Array, num_spare: int, min_part: int) -> tuple[int, Int64Array]:
    """Tokens of a part, and the parts of each row."""
    part_len = max(min_part, -(-int(own_lens.sum()) // (num_spare * min_part)) * min_part)
    return part_len, np.where(own_lens <= WHOLE_PART, 1, -(-own_lens // part_len))


def cut_prefixes(
    prefixes: Sequence[Prefix],
    num_rows: int,
    num_kv_heads: int,
    members_per_tile: int,
    max_tiles: int,
    max_parts: int,
    code_shift: int,
) -> PrefixPlan | None:
    """Cut the prefixes that save most into at most `max_tiles` tiles; None if there are none."""
    chosen: list[Prefix] = []
    num_tiles = 0
    for prefix in sorted(prefixes, key=lambda one: -(len(one.rows) - 1) * one.num_tokens):
        tiles = -(-len(prefix.rows) // members_per_tile)
        if num_tiles + tiles <= max_tiles:
            chosen.append(prefix)
            num_tiles += tiles
    if not chosen:
        return None
    wanted_parts = min(max_parts, max_tiles // num_tiles, max(1, PREFIX_PROGRAMS // (num_tiles * num_kv_heads)))
    lens, codes = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    made: list[tuple[int, ...]] = []
    members: list[int] = []
    for prefix in chosen:
        part_len = max(MIN_PART, -(-prefix.num_tokens // (wanted_parts * MIN_PART)) * MIN_PART)
        num_parts = -(-prefix.num_tokens // part_len)
        first_member, count = len(members), len(prefix.rows)
        rows = np.asarray(prefix.rows)
        members.extend(prefix.rows)
        lens[rows] = prefix.num_tokens
        codes[rows] = (np.arange(count) + first_member) * 2**code_shift + num_parts
        for first in range(0, count, members_per_tile):
            num_members = min(members_per_tile, count - first)
            for part in range(num_parts):
                end = min((part + 1) * part_len, prefix.num_tokens)
                made.append((first_member + first, num_members, prefix.rows[0], part * part_len, end, part, 0, 0))
    plan = PrefixPlan(np.array(members), np.array(made), lens, codes)
    plan.tiles[0, 6] = len(made)
    return plan


def cut_queries(query_lens: Int64Array, seq_lens: Int64Array, queries_per_tile: int) -> tuple[Int64Array, Int64Array]:
    """Cut prefill rows into tiles: (row of each tile, part of each tile), those with the most keys first."""
    num_parts = -(-query_lens // queries_per_tile)
    rows = np.repeat(np.arange(len(query_lens)), num_parts)
    parts = np.arange(len(rows)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    num_keys = (seq_lens - query_lens)[rows] + (parts + 1) * queries_per_tile
    order = np.argsort(-num_keys, kind="stable")
    return rows[order], parts[order]
