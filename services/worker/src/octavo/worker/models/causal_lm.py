"""The interface between the runners and whoever computes a model."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from octavo.worker.attention import StepAttention
from octavo.worker.models.config import ModelConfig


class CausalLm(ABC):
    """Tensors in, tensors out; it keeps no state of a sequence."""

    config: ModelConfig
    kv_scales: Tensor | None = None
    """float32 [num_layers, 2, num_kv_heads], if the checkpoint has them."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of hidden states, keys and values."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """`token_ids` and `positions` are int64 [num_tokens]. Returns hidden states [num_tokens, hidden_size]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size] for hidden states [num_rows, hidden_size]."""
