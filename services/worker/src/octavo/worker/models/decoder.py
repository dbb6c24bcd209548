"""The Llama-family decoder: Llama, Mistral, Qwen2, Qwen3. Tensors in, tensors out; it keeps no state of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.attention import StepAttention
from octavo.worker.models.config import ModelConfig
from octavo.worker.models.linear import Linear
from octavo.worker.models.rotary import Rotary, turn_


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer."""

    input_norm: Tensor  # [hidden_size]
    qkv: Linear  # rows: query heads, key heads, value heads
    query_norm: Tensor | None  # [head_dim], Qwen3 only, as is the next
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Linear  # rows: gate, up
    down: Linear


class Decoder:
    """Runs one batch of tokens of any sequences through the model."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,  # [vocab_size, hidden_size]
        layers: list[DecoderLayer],
        norm: Tensor,  # [hidden_size]
        output: Linear,  # hidden_size to vocab_size
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.output = output
        self._rotary = Rotary(config.rope, config.head_dim, embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """`token_ids` and `positions` are int64 [num_tokens]. Returns hidden states [num_tokens, hidden_size]."""
        config = self.config
        num_turned = config.num_heads + config.num_kv_heads
        hidden = F.embedding(token_ids, self.embedding)
        cos, sin = self._rotary.angles(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normalise(hidden, layer.input_norm))
            heads = qkv.view(len(hidden), -1, config.head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = heads[:, : config.num_heads], heads[:, config.num_heads : num_turned]
                query.copy_(self._normalise(query, layer.query_norm))
                key.copy_(self._normalise(key, layer.key_norm))
            turn_(heads[:, :num_turned], cos, sin)
            key_value = heads[:, config.num_heads :].view(-1, 2, config.num_kv_heads, config.head_dim)
            attended = attention.forward(index, heads[:, : config.num_heads], key_value)
            hidden = layer.output.add_to(hidden, attended)
            gate, up = layer.gate_up(self._normalise(hidden, layer.mlp_norm)).chunk(2, -1)
            hidden = layer.down.add_to(hidden, F.silu(gate).mul_(up))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size] for hidden states [num_rows, hidden_size]."""
        return self.output(self._normalise(hidden, self.norm)).float()

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)
