"""A decode step of one row: products bound by reading weights, with everything between them fused in."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.worker.kernels.single_row_product import TILING, Tiling, single_row_product
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.gpu_decoder import FusedAttention, layer_norms
from octavo.worker.models.linear import Linear, PlainLinear


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
