"""Any causal language model of transformers, its attention replaced by ours over the paged pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from octavo.worker.attention import LayerAttention, StepAttention
from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.models.config import ModelConfig
from octavo.worker.models.errors import UnknownArchitectureError

ATTENTION = "octavo_paged"
"""The name of our attention among those of transformers."""
IGNORED = {"dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "cu_seq_lens_q"}
"""What attention is told and need not know: all tokens' positions are known to the step."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asked of attention."""

    layer: int
    how: LayerAttention
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Attender:
    """What the attention modules of one model hand their queries, keys and values to."""

    def __init__(self) -> None:
        self.step: StepAttention | None = None
        self.calls: list[AttentionCall] = []

    def attend(self, layer: int, how: LayerAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[num_tokens, num_heads, head_dim] from the same, and keys and values with num_kv_heads.

        Without a step the call is recorded; of a single token the result is its value.
        """
        if self.step is not None:
            return self.step.forward(layer, query, torch.stack((key, value), 1)).view(query.shape)
        _, num_heads, head_dim = query.shape
        self.calls.append(AttentionCall(layer, how, num_heads, key.shape[1], head_dim))
        return value.repeat_interleave(num_heads // key.shape[1], 1)


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Returns [1, num_tokens, num_heads, head_dim]."""
    attender: Attender = module.octavo_attender  # type: ignore[assignment]
    if attender.step is None:
        _check_call(module, query, key, value, attention_mask, is_causal, others)
    how = LayerAttention(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        soft_cap=softcap or 0.0,
    )
    layer: int = module.layer_idx  # type: ignore[assignment]
    return attender.attend(layer, how, *(part[0].transpose(0, 1) for part in (query, key, value)))[None], None


def _check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnknownArchitectureError("a layer's attention is not causal")
    if attention_mask is not None:
        raise UnknownArchitectureError("the model makes an attention mask of its own")
    if odd := sorted(
        name for name, value in others.items() if name not in IGNORED and value is not None and value is not False
    ):
        raise UnknownArchitectureError(f"a layer's attention has settings that no kernel here has: {', '.join(odd)}")
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        raise UnknownArchitectureError("queries, keys and values have heads of different sizes")
    if query.shape[1] % key.shape[1]:
        raise UnknownArchitectureError(f"{query.shape[1]} query heads cannot share {key.shape[1]} KV heads evenly")


transformers.AttentionInterface.register(ATTENTION, _attend)


class _GivenHidden(nn.Module):
    """Stands where the decoder was: the hidden states are computed already."""

    def __init__(self, output_class: type[ModelOutput]) -> None:
        super().__init__()
        self._output_class: Any = output_class

    def forward(self, *ids: Any, inputs_embeds: Tensor, **others: Any) -> ModelOutput:
        """`inputs_embeds` are the decoder's last hidden states."""
        output: ModelOutput = self._output_class(last_hidden_state=inputs_embeds)
        return output


class TransformersModel(CausalLm):
    """Splits the model at its last hidden states: the decoder for all tokens, the head for those that are sampled."""

    def __init__(self, config: ModelConfig, model: Any, attender: Attender, output_class: type[ModelOutput]) -> None:
        """`model` uses ATTENTION, its modules have `attender`; it is changed. Its decoder gives an `output_class`."""
        self.config = config
        self._attender = attender
        self._decoder: nn.Module = model.get_decoder()
        place = next((name for name, module in model.named_modules() if module is self._decoder), "")
        if not place:
            raise UnknownArchitectureError(f"{config.architecture} has no decoder apart from its output layer")
        model.set_submodule(place, _GivenHidden(output_class))
        self._head = model
        weight = next(self._decoder.parameters())
        self._dtype: torch.dtype = weight.dtype
        self._device: torch.device = weight.device

    @property
    def dtype(self) -> torch.dtype:
        """See CausalLm."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """See CausalLm."""
        return self._device

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention) -> Tensor:
        """See CausalLm."""
        self._attender.step = attention
        try:
            out = self._decoder(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._attender.step = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLm."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()
