"""Attention of many queries at once, by the fastest kernel that computes what is asked for."""

from __future__ import annotations

from torch import Tensor

from octavo.worker.kernels.decode_rows import PrefixScratch, PrefixTiles
from octavo.worker.kernels.hopper_kernels import hopper_kernels
from octavo.worker.kernels.paged_prefill import PrefillRows, paged_prefill
from octavo.worker.kernels.paged_prefix import paged_prefix


def prefill(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    rows: PrefillRows,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float = 0.0,
    scales: Tensor | None = None,
) -> None:
    """Fill the rows' tokens of `out`, by the rules of `paged_decode`; a query sees positions up to its own."""
    hopper = hopper_kernels("hopper_prefill")
    if hopper is not None and hopper.serves(query, cache, window=window, soft_cap=soft_cap, scales=scales):
        hopper.hopper_prefill(query, cache, tables, rows, out, scale=scale)
    else:
        paged_prefill(query, cache, tables, rows, out, scale=scale, window=window, soft_cap=soft_cap, scales=scales)


def prefix(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    tiles: PrefixTiles,
    scratch: PrefixScratch,
    *,
    scale: float,
    soft_cap: float = 0.0,
    scales: Tensor | None = None,
) -> None:
    """Attend to shared prefixes for all members of their groups: see `paged_prefix`."""
    hopper = hopper_kernels("hopper_prefix")
    if hopper is not None and hopper.serves(query, cache, soft_cap=soft_cap, scales=scales):
        hopper.hopper_prefix(query, cache, tables, tiles, scratch, scale=scale)
    else:
        paged_prefix(query, cache, tables, tiles, scratch, scale=scale, soft_cap=soft_cap, scales=scales)
