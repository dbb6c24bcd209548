"""A model of transformers on a GPU: its own layers around our kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.worker.attention import StepAttention
from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.models.gpu_decoder import FusedAttention, GpuModel


class GpuTransformers(GpuModel):
    """Launched layer by layer: code of any model may wait for the device, which no graph can record."""

    can_capture = False

    def __init__(self, model: CausalLm) -> None:
        self._model = model
        self.config = model.config

    @property
    def device(self) -> torch.device:
        """See GpuModel."""
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """See GpuModel."""
        return self._model.dtype

    def forward(self, token_ids: Tensor, attention: FusedAttention, wanted: Tensor | None = None) -> Tensor:
        """See GpuModel."""
        positions = attention.positions.clamp_min(0)  # those of padding are negative
        hidden = self._model.forward(token_ids.long(), positions.long(), _Unfused(attention))
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def logits(self, hidden: Tensor, out: Tensor) -> Tensor:
        """See GpuModel."""
        return out.copy_(self._model.logits(hidden))


class _Unfused(StepAttention):
    """Queries and keys come turned: the model's ropes are None, so that the kernel turns them by nothing."""

    def __init__(self, fused: FusedAttention) -> None:
        self._fused = fused

    def forward(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """See StepAttention."""
        return self._fused.forward(layer, torch.cat((query, key_value.flatten(1, 2)), 1), None)
