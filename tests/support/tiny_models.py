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
    "yarn_rope": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "dynamic_rope": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "smollm3": (
        transformers.SmolLM3Config,
        transformers.SmolLM3ForCausalLM,
        {"no_rope_layer_interval": 2, "num_hidden_layers": 4},
    ),
    "smollm3_window": (
        transformers.SmolLM3Config,
        transformers.SmolLM3ForCausalLM,
        {"no_rope_layer_interval": 2, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 19},
    ),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, {"head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {
            "sliding_window": 21,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {
            "num_hidden_layers": 4,
            "sliding_window": 21,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
            },
        },
    ),
    "phi3": (
        transformers.Phi3Config,
        transformers.Phi3ForCausalLM,
        {"sliding_window": 40, "original_max_position_embeddings": 256},
    ),
    "phi3_longrope": (
        transformers.Phi3Config,
        transformers.Phi3ForCausalLM,
        {
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.4],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
            },
        },
    ),
}

OF_TRANSFORMERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt_neox": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM, {"rotary_pct": 0.5}),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel, {}),
    "opt": (transformers.OPTConfig, transformers.OPTForCausalLM, {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
    "granite": (
        transformers.GraniteConfig,
        transformers.GraniteForCausalLM,
        {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0, "logits_scaling": 1.5},
    ),
    "stablelm": (transformers.StableLmConfig, transformers.StableLmForCausalLM, {"partial_rotary_factor": 0.5}),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM, {"sliding_window": 21}),
    "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM, {"logit_scale": 0.4}),
    "cohere2": (
        transformers.Cohere2Config,
        transformers.Cohere2ForCausalLM,
        {"sliding_window": 21, "sliding_window_pattern": 2},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "phi3_partly_turned": (
        transformers.Phi3Config,
        transformers.Phi3ForCausalLM,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
}
"""Models that transformers computes, around our attention."""


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
    config_class, model_class, settings = {**ARCHITECTURES, **OF_TRANSFORMERS}[name]
    torch.manual_seed(7)
    model = model_class(config_class(**{**SHAPE, **settings, **overrides})).eval().to(torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases start as ones and zeros, which would hide a mix-up
            torch.nn.init.normal_(parameter, mean=parameter.detach().mean().item(), std=0.2)
    model.set_attn_implementation("eager")  # sdpa of some releases leaves soft caps out
    model.save_pretrained(folder)
    return TinyModel(folder, model)


def prompt_of(length: int) -> list[int]:
    """A prompt without a short period."""
    return [(7 * index * index + 3 * index + length) % (VOCAB_SIZE - 3) + 3 for index in range(length)]
