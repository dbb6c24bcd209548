"""Tiny random models of every architecture, saved as Hugging Face folders, and what transformers makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB_SIZE = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3_rope": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "linear_rope": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": False}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "mistral_window": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 21}),
    "mistral_short_window": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 5}),
    "qwen2_window_in_upper_layers": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A saved model, and the same one in transformers."""

    folder: Path
    reference: Any

    def logits(self, token_ids: list[int]) -> Tensor:
        """transformers' logits, [num_tokens, vocab_size]."""
        with torch.inference_mode():
            logits: Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """transformers' greedy tokens, past any end of sequence."""
        with torch.inference_mode():
            out = self.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=-1,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def save_tiny_model(name: str, folder: Path, **overrides: Any) -> TinyModel:
    """Make the model called `name` with fixed random weights."""
    config_class, model_class, settings = ARCHITECTURES[name]
    torch.manual_seed(7)
    model = model_class(config_class(**{**SHAPE, **settings, **overrides})).eval().to(torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases start as ones and zeros, which would hide a mix-up
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.2)
    model.save_pretrained(folder)
    return TinyModel(folder, model)


def prompt_of(length: int) -> list[int]:
    """A prompt without a short period."""
    return [(7 * index * index + 3 * index + length) % (VOCAB_SIZE - 3) + 3 for index in range(length)]
