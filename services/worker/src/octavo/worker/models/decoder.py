"""The dense decoder of the Llama, Qwen, Gemma and Phi families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.attention import StepAttention
from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.models.config import DecoderConfig
from octavo.worker.models.linear import Linear
from octavo.worker.models.rotary import Rotary, turn_


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Norms of Gemma are float32, with one added."""

    input_norm: Tensor  # [hidden_size]
    qkv: Linear  # rows: query heads, key heads, value heads
    query_norm: Tensor | None  # [head_dim], of Qwen3 and Gemma 3, as is the next
    key_norm: Tensor | None
    output: Linear
    output_norm: Tensor | None  # [hidden_size], of what attention adds; Gemma 2 and 3, as is `down_norm`
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Linear  # rows: gate, up
    down: Linear
    down_norm: Tensor | None


class Decoder(CausalLm):
    """Runs one batch of tokens of any sequences through the model."""

    config: DecoderConfig

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,  # [vocab_size, hidden_size]
        layers: list[DecoderLayer],
        norm: Tensor,  # [hidden_size]
        output: Linear,  # hidden_size to vocab_size
        kv_scales: Tensor | None = None,  # float32 [num_layers, 2, num_kv_heads], if the checkpoint has them
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.output = output
        self.kv_scales = kv_scales
        self._rotaries = {
            rope: Rotary(rope, config.head_dim, embedding.device) for rope in config.ropes if rope is not None
        }

    @property
    def dtype(self) -> torch.dtype:
        """See CausalLm."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """See CausalLm."""
        return self.embedding.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] to [num_tokens, hidden_size]."""
        hidden = F.embedding(token_ids, self.embedding)
        if self.config.scaled_embedding:
            hidden.mul_(torch.tensor(self.config.hidden_size**0.5, dtype=hidden.dtype).item())
        return hidden

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """See CausalLm."""
        config = self.config
        num_turned = config.num_heads + config.num_kv_heads
        hidden = self.embed(token_ids)
        angles = {rope: rotary.angles(positions, hidden.dtype) for rope, rotary in self._rotaries.items()}
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._normalise(hidden, layer.input_norm))
            heads = qkv.view(len(hidden), -1, config.head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                query, key = heads[:, : config.num_heads], heads[:, config.num_heads : num_turned]
                query.copy_(self._normalise(query, layer.query_norm))
                key.copy_(self._normalise(key, layer.key_norm))
            if (rope := config.ropes[index]) is not None:
                turn_(heads[:, :num_turned], *angles[rope])
            key_value = heads[:, config.num_heads :].view(-1, 2, config.num_kv_heads, config.head_dim)
            attended = attention.forward(index, heads[:, : config.num_heads], key_value)
            hidden = self._add(hidden, layer.output, attended, layer.output_norm)
            gated = self._gate(layer.gate_up(self._normalise(hidden, layer.mlp_norm)))
            hidden = self._add(hidden, layer.down, gated, layer.down_norm)
        return hidden

    def _gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) if self.config.activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def _add(self, residual: Tensor, linear: Linear, x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None:
            return linear.add_to(residual, x)
        return residual.add_(self._normalise(linear(x), norm))

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLm."""
        logits = self.output(self._normalise(hidden, self.norm))
        return cap_logits_(logits, self.config.logit_cap).float()

    def _normalise(self, x: Tensor, weight: Tensor) -> Tensor:
        normalised = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.config.norm_eps)
        return normalised.to(x.dtype)


def cap_logits_(logits: Tensor, cap: float) -> Tensor:
    """Bring `logits` within +- `cap` by tanh, in place, unless it is 0."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits
