"""The same decoder on a GPU: fused kernels around the matrix products, nothing that waits for the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.worker.kernels.few_row_linear import MAX_ROWS, add_few_row_linear
from octavo.worker.kernels.gate_mul import gate_mul_e4m3, gelu_mul, silu_mul
from octavo.worker.kernels.rms_norm import rms_norm, rms_norm_e4m3
from octavo.worker.models.config import DecoderConfig, ModelConfig
from octavo.worker.models.decoder import Decoder, DecoderLayer, cap_logits_
from octavo.worker.models.linear import Linear, PlainLinear
from octavo.worker.models.scaled_linear import ScaledLinear

if TYPE_CHECKING:
    from octavo.worker.models.few_rows import FewRows
    from octavo.worker.models.single_row import SingleRow

Norms = tuple[Tensor, Tensor]
"""Weights that normalise query and key heads, each [head_dim]."""


class FusedAttention(ABC):
    """Attention of one step, which also turns queries and keys by their positions."""

    positions: Tensor  # int32 [num_tokens], negative for padding

    @abstractmethod
    def forward(self, layer: int, heads: Tensor, norms: Norms | None, *, overlaps: bool = False) -> Tensor:
        """Store keys and values, then attend to all that each token may see.

        `heads` is [num_tokens, num_heads + 2 * num_kv_heads, head_dim], dense: query, key, value heads as the
        projection gives them; it is overwritten. Returns [num_tokens, num_heads * head_dim]. `overlaps`: what it
        launches may be of kernels.overlap.
        """


class GpuModel(ABC):
    """What the GPU's runner asks of a model."""

    config: ModelConfig
    can_capture: bool
    """A forward pass may be recorded as a graph."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of hidden states, keys and values."""

    @abstractmethod
    def forward(self, token_ids: Tensor, attention: FusedAttention, wanted: Tensor | None = None) -> Tensor:
        """`token_ids` is int32 or int64 [num_tokens]. Returns hidden states [num_tokens, hidden_size], or those of the
        `wanted` tokens, int32 [num_wanted] of their places."""

    @abstractmethod
    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """Fill and return `out` [num_rows, vocab_size] for hidden states [num_rows, hidden_size]."""


class GpuDecoder(GpuModel):
    """Runs a decoder's weights with the kernels of this package."""

    config: DecoderConfig
    can_capture = True

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self._gate = silu_mul if decoder.config.activation == "silu" else gelu_mul
        assert isinstance(decoder.output, PlainLinear)
        self._output_weight = decoder.output.weight
        self.single_row: SingleRow | None = None
        """How one row is run, if not as several are."""
        self.few_rows: FewRows | None = None
        """How steps of few rows are run, of the sizes that it says."""
        self.overlaps = False
        """Kernels between matrix products start while those end: see kernels.overlap."""

    @property
    def device(self) -> torch.device:
        """See GpuModel."""
        return self.decoder.device

    @property
    def dtype(self) -> torch.dtype:
        """See GpuModel."""
        return self.decoder.dtype

    def forward(self, token_ids: Tensor, attention: FusedAttention, wanted: Tensor | None = None) -> Tensor:
        """See GpuModel. The last layer is completed for the wanted tokens only."""
        fused = self._fused(len(token_ids))
        if fused is not None:
            hidden = fused.forward(token_ids, attention)
            return hidden if wanted is None else hidden.index_select(0, wanted)
        hidden = self.decoder.embed(token_ids)
        last = len(self.decoder.layers) - 1
        for index, layer in enumerate(self.decoder.layers):
            heads = self._normalised(layer.qkv, hidden, layer.input_norm)
            attended = self._attend(index, layer, heads, attention)
            if wanted is not None and index == last:
                if not len(wanted):
                    return hidden[:0]
                hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
            hidden = self._add(hidden, layer.output, attended, layer.output_norm)
            gate_up = self._normalised(layer.gate_up, hidden, layer.mlp_norm)
            if isinstance(layer.down, ScaledLinear) and layer.down_norm is None:
                stored = gate_mul_e4m3(gate_up, self._gate is gelu_mul, overlaps=self.overlaps)
                hidden.add_(layer.down.product(*stored))
            else:
                hidden = self._add(hidden, layer.down, self._gate(gate_up, overlaps=self.overlaps), layer.down_norm)
        return hidden

    def _fused(self, num_rows: int) -> SingleRow | FewRows | None:
        if num_rows == 1 and self.single_row is not None:
            return self.single_row
        return self.few_rows if self.few_rows is not None and self.few_rows.runs(num_rows) else None

    def _add(self, residual: Tensor, linear: Linear, x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return _add_to(residual, linear, x)
        return residual.add_(rms_norm(linear(x), norm, self.config.norm_eps, overlaps=self.overlaps))

    def _normalised(self, linear: Linear, x: Tensor, norm: Tensor) -> Tensor:
        """The layer's output for normalised rows, which are rounded at once if it takes e4m3."""
        eps = self.config.norm_eps
        if isinstance(linear, ScaledLinear):
            return linear.product(*rms_norm_e4m3(x, norm, eps, overlaps=self.overlaps))
        return linear(rms_norm(x, norm, eps, overlaps=self.overlaps))

    def _attend(self, index: int, layer: DecoderLayer, heads: Tensor, attention: FusedAttention) -> Tensor:
        heads = heads.view(len(heads), -1, self.config.head_dim)
        return attention.forward(index, heads, layer_norms(layer), overlaps=self.overlaps)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """See GpuModel."""
        normalised = rms_norm(hidden, self.decoder.norm, self.config.norm_eps, overlaps=self.overlaps)
        return cap_logits_(torch.mm(normalised, self._output_weight.t(), out=out), self.config.logit_cap)


def layer_norms(layer: DecoderLayer) -> Norms | None:
    """Of the layer's query and key heads."""
    if layer.query_norm is None or layer.key_norm is None:
        return None
    return layer.query_norm, layer.key_norm


def _add_to(residual: Tensor, linear: Linear, x: Tensor) -> Tensor:
    """The residual, overwritten by its sum with the layer's output."""
    if len(x) <= MAX_ROWS and x.dtype != torch.float32 and isinstance(linear, PlainLinear):
        return add_few_row_linear(residual, x, linear.weight, linear.bias)
    return linear.add_to(residual, x)
