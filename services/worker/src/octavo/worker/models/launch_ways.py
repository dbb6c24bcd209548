"""Which way to launch a decoder's layers is the fastest here, by the clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import structlog
import torch
from torch import Tensor

from octavo.worker.kernels.compile_ahead import compiling_ahead
from octavo.worker.kernels.hopper_kernels import hopper_kernels
from octavo.worker.kernels.overlap import can_overlap
from octavo.worker.models.gpu_decoder import FusedAttention, GpuDecoder
from octavo.worker.models.graph_timing import graph_ms
from octavo.worker.models.single_row import SingleRow

log = structlog.get_logger()

ALIKE = 0.1
"""Relative difference of hidden states by rounding in all layers, at most; wrong ones are far above."""
WORTH_IT = 0.99
"""Share of the usual way's time below which another one is taken."""
SEVERAL_ROWS = 16
"""As many as are timed for all numbers above one."""

Way = Callable[[], Tensor]
"""Runs the model without attention and gives hidden states."""


class _NoAttention(FusedAttention):
    """Passes the query heads on, so that only the rest is timed."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads

    def forward(self, layer: int, heads: Tensor, norms: object, *, overlaps: bool = False) -> Tensor:
        """See FusedAttention."""
        return heads[:, : self._num_heads].reshape(len(heads), -1)


@torch.inference_mode()
def choose_single_row(model: GpuDecoder) -> dict[str, float]:
    """Give the model the fastest way to run one row. Returns the milliseconds of each."""
    decoder = model.decoder
    if not SingleRow.serves(decoder):
        return {}
    ways = {"fused": SingleRow(decoder, overlaps=False)}
    if can_overlap():
        ways["overlapping"] = SingleRow(decoder, overlaps=True)
    token_ids, attention = _rows(model, 1), _NoAttention(model.config.num_heads)
    model.single_row = None
    best, times = _fastest(
        lambda: model.forward(token_ids, attention),
        {name: lambda way=way: way.forward(token_ids, attention) for name, way in ways.items()},  # type: ignore[misc]
    )
    model.single_row = ways.get(best)
    return times


@torch.inference_mode()
def choose_overlap(model: GpuDecoder) -> dict[str, float]:
    """Let the kernels between the products of several rows overlap with them where that is faster. Returns the same."""
    if not can_overlap():
        return {}
    token_ids, attention = _rows(model, SEVERAL_ROWS), _NoAttention(model.config.num_heads)

    def forward(overlaps: bool) -> Tensor:
        model.overlaps = overlaps
        return model.forward(token_ids, attention)

    best, times = _fastest(lambda: forward(False), {"overlapping": lambda: forward(True)})
    model.overlaps = best == "overlapping"
    return times


@torch.inference_mode()
def choose_few_rows(model: GpuDecoder) -> dict[int, dict[str, float]]:
    """Let steps of few rows run by the kernels for Hopper where those are faster. Returns the same by their size."""
    if hopper_kernels("few_row_products") is None:
        return {}
    from octavo.worker.models.few_rows import SIZES, FewRows

    if not FewRows.serves(model.decoder):
        return {}
    few_rows, attention = FewRows(model.decoder), _NoAttention(model.config.num_heads)
    model.few_rows = None
    times: dict[int, dict[str, float]] = {}
    chosen: set[int] = set()
    for size in SIZES:
        token_ids = _rows(model, size * 3 // 4)  # the middle of the steps that are padded to this size
        best, times[size] = _fastest(
            lambda token_ids=token_ids: model.forward(token_ids, attention),  # type: ignore[misc]
            {"few_rows": lambda token_ids=token_ids: few_rows.forward(token_ids, attention)},  # type: ignore[misc]
        )
        if best == "few_rows":
            chosen.add(size)
    few_rows.sizes = frozenset(chosen)
    model.few_rows = few_rows if chosen else None
    return times


def _rows(model: GpuDecoder, num_rows: int) -> Tensor:
    first = model.config.vocab_size // 2
    return torch.arange(first, first + num_rows, dtype=torch.int32, device=model.device) % model.config.vocab_size


def _fastest(usual: Way, ways: dict[str, Way]) -> tuple[str, dict[str, float]]:
    """The name of the best way, and the milliseconds of each.

    A way that cannot be recorded here, or whose hidden states are others than the usual ones, is left out.
    """
    with compiling_ahead():
        for way in (usual, *ways.values()):
            with suppress(Exception):  # said below
                way()
    expected = usual()
    times = {"usual": graph_ms(usual)}
    for name, way in ways.items():
        try:
            difference = (way() - expected).float().norm().item()
            if not difference <= ALIKE * expected.float().norm().item():
                log.warning("layers come out wrong", way=name, difference=difference)
                continue
            times[name] = graph_ms(way)
        except Exception as error:
            log.warning("layers cannot be run so", way=name, error=str(error))
    best = min(times, key=lambda name: times[name])
    return best if times[best] < WORTH_IT * times["usual"] else "usual", times
