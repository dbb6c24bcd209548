"""The same decoder on a GPU: fused kernels around the matrix products, nothing that waits for the host."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.kernels.few_row_linear import MAX_ROWS, add_few_row_linear
from octavo.worker.kernels.rms_norm import rms_norm
from octavo.worker.kernels.silu_mul import silu_mul
from octavo.worker.models.config import ModelConfig
from octavo.worker.models.decoder import Decoder, DecoderLayer
from octavo.worker.models.linear import Linear, PlainLinear
from octavo.worker.models.rotary import inverse_frequencies

Norms = tuple[Tensor, Tensor]
"""Weights that normalise query and key heads, each [head_dim]."""


class FusedAttention(ABC):
    """Attention of one step, which also turns queries and keys by their positions."""

    @abstractmethod
    def forward(self, layer: int, heads: Tensor, norms: Norms | None) -> Tensor:
        """Store keys and values, then attend to all that each token may see.

        `heads` is [num_tokens, num_heads + 2 * num_kv_heads, head_dim], dense: query, key, value heads as the
        projection gives them; it is overwritten. Returns [num_tokens, num_heads * head_dim].
        """


class GpuDecoder:
    """Runs a decoder's weights with the kernels of this package."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        assert isinstance(decoder.output, PlainLinear)
        self._output_weight = decoder.output.weight

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    def forward(self, token_ids: Tensor, attention: FusedAttention) -> Tensor:
        """`token_ids` is int32 or int64 [num_tokens]. Returns hidden states [num_tokens, hidden_size]."""
        eps = self.config.rms_norm_eps
        hidden = F.embedding(token_ids, self.decoder.embedding)
        for index, layer in enumerate(self.decoder.layers):
            heads = layer.qkv(rms_norm(hidden, layer.input_norm, eps))
            hidden = _add_to(hidden, layer.output, self._attend(index, layer, heads, attention))
            hidden = _add_to(hidden, layer.down, silu_mul(layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps))))
        return hidden

    def _attend(self, index: int, layer: DecoderLayer, heads: Tensor, attention: FusedAttention) -> Tensor:
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, layer.key_norm)
        return attention.forward(index, heads.view(len(heads), -1, self.config.head_dim), norms)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Fill and return `out` [num_rows, vocab_size] for hidden states [num_rows, hidden_size]."""
        normalised = rms_norm(hidden, self.decoder.norm, self.config.rms_norm_eps)
        return torch.mm(normalised, self._output_weight.t(), out=out)


def _add_to(residual: Tensor, linear: Linear, x: Tensor) -> Tensor:
    """The residual, overwritten by its sum with the layer's output."""
    if len(x) <= MAX_ROWS and x.dtype != torch.float32 and isinstance(linear, PlainLinear):
        return add_few_row_linear(residual, x, linear.weight, linear.bias)
    return linear.add_to(residual, x)


def cos_sin_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """float32 [num_positions, head_dim]: cosines of the half, then sines."""
    frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)
