"""Attention of rows with many queries each, by the fastest kernel that computes what is asked for."""

from __future__ import annotations

import functools
from types import ModuleType

import structlog
import torch
import triton
from torch import Tensor

from octavo.worker.kernels.paged_prefill import PrefillRows, paged_prefill

log = structlog.get_logger()


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
    hopper = _hopper()
    if hopper is not None and hopper.serves(query, cache, window=window, soft_cap=soft_cap, scales=scales):
        hopper.hopper_prefill(query, cache, tables, rows, out, scale=scale)
    else:
        paged_prefill(query, cache, tables, rows, out, scale=scale, window=window, soft_cap=soft_cap, scales=scales)


@functools.cache
def _hopper() -> ModuleType | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    try:
        from octavo.worker.kernels import hopper_prefill
    except (ImportError, AttributeError) as error:  # Gluon is an experimental part of Triton, and changes
        log.warning("prefill attention without Gluon", triton=triton.__version__, error=repr(error))
        return None
    return hopper_prefill
