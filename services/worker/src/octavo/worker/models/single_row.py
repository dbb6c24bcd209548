"""A decode step of one row: products bound by reading weights, with everything between them fused in."""

from __future__ import annotations

import structlog
import torch
from torch import Tensor

from octavo.worker.kernels.overlap import can_overlap
from octavo.worker.kernels.single_row_product import TILING, Tiling, single_row_product
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.gpu_decoder import FusedAttention, GpuDecoder, layer_norms
from octavo.worker.models.graph_timing import graph_ms
from octavo.worker.models.linear import Linear, PlainLinear

log = structlog.get_logger()

ALIKE = 0.1
"""Relative difference of hidden states by rounding in all layers, at most; wrong ones are far above."""
WORTH_IT = 0.99
"""Share of the usual way's time below which this one is taken."""


class SingleRow:
    """Runs a decoder's layers for one token: six launches a layer instead of nine."""

    def __init__(self, decoder: Decoder, *, overlaps: bool, tiling: Tiling = TILING) -> None:
        """`overlaps`: each launch begins to read its weights while the one before it ends."""
        self._decoder = decoder
        self._overlaps = overlaps
        self._tiling = tiling

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Plain 16-bit weights, a SiLU gate, and no norm of what a layer adds."""
        layers = decoder.layers
        linears = [one for layer in layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        return (
            decoder.dtype in (torch.bfloat16, torch.float16)
            and decoder.config.activation == "silu"
            and all(isinstance(linear, PlainLinear) for linear in linears)
            and all(layer.output_norm is None and layer.down_norm is None for layer in layers)
        )

    def forward(self, token_ids: Tensor, attention: FusedAttention) -> Tensor:
        """As GpuModel.forward, for one token."""
        config = self._decoder.config
        eps = config.norm_eps
        hidden = self._decoder.embed(token_ids)
        for index, layer in enumerate(self._decoder.layers):
            heads = self._product(hidden, layer.qkv, layer.input_norm, eps).view(1, -1, config.head_dim)
            attended = attention.forward(index, heads, layer_norms(layer), overlaps=self._overlaps)
            hidden = self._product(attended, layer.output, add_to=hidden)
            gated = self._product(hidden, layer.gate_up, layer.mlp_norm, eps, is_gated=True)
            hidden = self._product(gated, layer.down, add_to=hidden)
        return hidden

    def _product(
        self,
        x: Tensor,
        linear: Linear,
        norm: Tensor | None = None,
        eps: float = 0.0,
        *,
        add_to: Tensor | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        assert isinstance(linear, PlainLinear)
        return single_row_product(
            x,
            linear.weight,
            linear.bias,
            norm,
            eps,
            add_to=add_to,
            is_gated=is_gated,
            overlaps=self._overlaps,
            tiling=self._tiling,
        )


class _NoAttention(FusedAttention):
    """Passes the query heads on, so that only the products are timed."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads

    def forward(self, layer: int, heads: Tensor, norms: object, *, overlaps: bool = False) -> Tensor:
        """See FusedAttention."""
        return heads[:, : self._num_heads].reshape(len(heads), -1)


@torch.inference_mode()
def choose_single_row(model: GpuDecoder) -> dict[str, float]:
    """Give the model the fastest way to run one row, by the clock. Returns the milliseconds of each but attention.

    A way that cannot be recorded here, or whose hidden states are others than the usual ones, is left out.
    """
    decoder = model.decoder
    if not SingleRow.serves(decoder):
        return {}
    ways = {"fused": SingleRow(decoder, overlaps=False)}
    if can_overlap():
        ways["overlapping"] = SingleRow(decoder, overlaps=True)
    token_ids = torch.tensor([model.config.vocab_size // 2], dtype=torch.int32, device=model.device)
    attention = _NoAttention(model.config.num_heads)
    model.single_row = None
    expected = model.forward(token_ids, attention)
    times = {"usual": graph_ms(lambda: model.forward(token_ids, attention))}
    for name, way in ways.items():
        try:
            difference = (way.forward(token_ids, attention) - expected).float().norm().item()
            if not difference <= ALIKE * expected.float().norm().item():
                log.warning("one row comes out wrong", way=name, difference=difference)
                continue
            times[name] = graph_ms(lambda way=way: way.forward(token_ids, attention))  # type: ignore[misc]
        except Exception as error:
            log.warning("one row cannot be run so", way=name, error=str(error))
    best = min(times, key=lambda name: times[name])
    model.single_row = ways[best] if times[best] < WORTH_IT * times["usual"] else None
    return times
