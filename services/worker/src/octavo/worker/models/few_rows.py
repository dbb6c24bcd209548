"""Steps of few rows on Hopper: products bound by reading weights, with RMSNorm, gate and residual in them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.worker.kernels.few_row_products import Scratch, add_product, gated_product, normed_product, pad_rows
from octavo.worker.kernels.rms_norm import rms_norm
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.gpu_decoder import FusedAttention, layer_norms
from octavo.worker.models.linear import Linear, PlainLinear
from octavo.worker.models.single_row import SingleRow

SIZES = (16, 32, 64)
"""Rows that the kernels are made for; steps of fewer are padded."""


class FewRows:
    """Runs a decoder's layers: six launches a layer instead of nine, and each reads weights while the last one ends."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.sizes = frozenset(SIZES)
        """Those that are to be run so."""
        layer = decoder.layers[0]
        most_out_features = max(len(_weight(layer.qkv)), len(_weight(layer.output)))
        self._scratch = Scratch(most_out_features, decoder.config.hidden_size, decoder.device)

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Plain bfloat16 weights whose lines the copy engine takes, biases only of qkv, and what SingleRow asks for.

        The residual times the weights of its norm is stored before it is divided: float16 could not hold it.
        """
        if not (SingleRow.serves(decoder) and decoder.dtype == torch.bfloat16):
            return False
        linears = [one for layer in decoder.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        adding = [one for layer in decoder.layers for one in (layer.output, layer.gate_up, layer.down)]
        return all(_weight(one).shape[1] % 8 == 0 for one in linears) and all(
            isinstance(one, PlainLinear) and one.bias is None for one in adding
        )

    def runs(self, num_rows: int) -> bool:
        """Whether steps of that many rows are to be run so."""
        return pad_rows(num_rows) in self.sizes

    def forward(self, token_ids: Tensor, attention: FusedAttention) -> Tensor:
        """As GpuModel.forward."""
        decoder, scratch = self._decoder, self._scratch
        eps, layers = decoder.config.norm_eps, decoder.layers
        hidden = decoder.embed(token_ids)
        heads = layers[0].qkv(rms_norm(hidden, layers[0].input_norm, eps, overlaps=True))
        for index, layer in enumerate(layers):
            heads = heads.view(len(heads), -1, decoder.config.head_dim)
            attended = attention.forward(index, heads, layer_norms(layer), overlaps=True)
            normed = add_product(hidden, attended, _weight(layer.output), layer.mlp_norm, scratch, overlaps=True)
            gated = gated_product(normed, _weight(layer.gate_up), eps, scratch, overlaps=True)
            is_last = index + 1 == len(layers)
            norm = decoder.norm if is_last else layers[index + 1].input_norm
            normed = add_product(hidden, gated, _weight(layer.down), norm, scratch, overlaps=True)
            if not is_last:
                qkv = layers[index + 1].qkv
                assert isinstance(qkv, PlainLinear)
                heads = normed_product(normed, qkv.weight, qkv.bias, eps, scratch, overlaps=True)
        return hidden


def _weight(linear: Linear) -> Tensor:
    assert isinstance(linear, PlainLinear)
    return linear.weight
