"""The same decoder on a GPU: fused kernels around the matrix products, nothing that waits for the host."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.kernels.few_row_linear import MAX_ROWS, few_row_linear
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
        hidden = F.embedding(token_ids, self.decoder.embedding)
        compute = self._few_row_layer if self._are_few(hidden) else self._layer
        for index, layer in enumerate(self.decoder.layers):
            hidden = compute(index, layer, hidden, attention)
        return hidden

    def _are_few(self, hidden: Tensor) -> bool:
        return len(hidden) <= MAX_ROWS and hidden.dtype != torch.float32

    def _layer(self, index: int, layer: DecoderLayer, hidden: Tensor, attention: FusedAttention) -> Tensor:
        eps = self.config.rms_norm_eps
        heads = layer.qkv(rms_norm(hidden, layer.input_norm, eps))
        hidden = layer.output.add_to(hidden, self._attend(index, layer, heads, attention))
        return layer.down.add_to(hidden, silu_mul(layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps))))

    def _few_row_layer(self, index: int, layer: DecoderLayer, hidden: Tensor, attention: FusedAttention) -> Tensor:
        """`hidden` is overwritten and returned."""
        eps = self.config.rms_norm_eps
        heads = few_row_linear(hidden, *_tensors(layer.qkv), norm=layer.input_norm, eps=eps)
        attended = self._attend(index, layer, heads, attention)
        few_row_linear(attended, *_tensors(layer.output), residual=hidden, out=hidden)
        gated = few_row_linear(hidden, *_tensors(layer.gate_up), norm=layer.mlp_norm, eps=eps, is_gated=True)
        return few_row_linear(gated, *_tensors(layer.down), residual=hidden, out=hidden)

    def _attend(self, index: int, layer: DecoderLayer, heads: Tensor, attention: FusedAttention) -> Tensor:
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, layer.key_norm)
        return attention.forward(index, heads.view(len(heads), -1, self.config.head_dim), norms)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Fill and return `out` [num_rows, vocab_size] for hidden states [num_rows, hidden_size]."""
        norm, eps = self.decoder.norm, self.config.rms_norm_eps
        if self._are_few(hidden):
            return few_row_linear(hidden, self._output_weight, norm=norm, eps=eps, out=out)
        return torch.mm(rms_norm(hidden, norm, eps), self._output_weight.t(), out=out)


def _tensors(linear: Linear) -> tuple[Tensor, Tensor | None]:
    assert isinstance(linear, PlainLinear)
    return linear.weight, linear.bias


def cos_sin_table(config: ModelConfig, num_positions: int, device: torch.device) -> Tensor:
    """float32 [num_positions, head_dim]: cosines of the half, then sines."""
    frequencies = inverse_frequencies(config.rope, config.head_dim).to(device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)
