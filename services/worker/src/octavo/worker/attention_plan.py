"""How attention of a step is cut into pieces of even work. Host side; numpy only."""

from __future__ import annotations

import numpy as np

from octavo.worker.attention import Int64Array

MIN_PART = 256
"""Tokens of context below which a part is not worth a program of its own."""
SPARE_PROGRAMS = 512
"""Programs, of items times KV heads, that long contexts may add to a launch; about four for each multiprocessor."""


def spare_items(num_kv_heads: int) -> int:
    """Items beyond one per row, which long contexts are split into. More of them cost more in merges than they even."""
    return max(16, SPARE_PROGRAMS // num_kv_heads)


def split_contexts(seq_lens: Int64Array, num_spare: int) -> tuple[Int64Array, Int64Array, int]:
    """Cut contexts into parts of one length: (row of each item, part of each item, tokens of a part).

    At most len(seq_lens) + num_spare items; those of a row are neighbours, in order.
    """
    part_len = max(MIN_PART, -(-int(seq_lens.sum()) // (num_spare * MIN_PART)) * MIN_PART)
    num_parts = -(-seq_lens // part_len)
    rows = np.repeat(np.arange(len(seq_lens)), num_parts)
    parts = np.arange(len(rows)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    return rows, parts, part_len


def cut_queries(query_lens: Int64Array, seq_lens: Int64Array, queries_per_tile: int) -> tuple[Int64Array, Int64Array]:
    """Cut prefill rows into tiles: (row of each tile, part of each tile), those with the most keys first."""
    num_parts = -(-query_lens // queries_per_tile)
    rows = np.repeat(np.arange(len(query_lens)), num_parts)
    parts = np.arange(len(rows)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    num_keys = (seq_lens - query_lens)[rows] + (parts + 1) * queries_per_tile
    order = np.argsort(-num_keys, kind="stable")
    return rows[order], parts[order]
