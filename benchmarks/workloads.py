"""Lists of (prompt token ids, number of output tokens), the same on every machine: numpy's PCG64 draws them.

All requests are generated greedily to exactly that many tokens, end-of-sequence ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Workload = list[tuple[list[int], int]]

TOKEN_IDS = (100, 127_000)
"""Ordinary ids of a vocabulary of 128,256."""

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The published shape of Llama-3.1-8B."""


def chat_like(num_requests: int = 1000, seed: int = 0, mean_prompt: int = 220, mean_output: int = 200) -> Workload:
    """W1: lengths of prompts and outputs log-normal."""
    draw = np.random.Generator(np.random.PCG64(seed))
    prompt_lens = _log_normal_lengths(draw, num_requests, mean_prompt, 1.0, 4, 2048)
    output_lens = _log_normal_lengths(draw, num_requests, mean_output, 0.8, 4, 1024)
    return [(_token_ids(draw, prompt), output) for prompt, output in zip(prompt_lens, output_lens, strict=True)]


def shared_prefix(
    num_requests: int = 500, seed: int = 1, shared: int = 1500, unique: int = 100, output: int = 100
) -> Workload:
    """W2: one system prompt, then a tail of each request's own."""
    draw = np.random.Generator(np.random.PCG64(seed))
    head = _token_ids(draw, shared)
    return [(head + _token_ids(draw, unique), output) for _ in range(num_requests)]


def long_prompts(num_requests: int = 32, seed: int = 2, prompt: int = 16_384, output: int = 256) -> Workload:
    """W3."""
    draw = np.random.Generator(np.random.PCG64(seed))
    return [(_token_ids(draw, prompt), output) for _ in range(num_requests)]


def equal_lengths(num_requests: int, prompt: int = 128, output: int = 128, seed: int = 1000) -> Workload:
    """L1 is one request, L64 are 64."""
    draw = np.random.Generator(np.random.PCG64(seed))
    return [(_token_ids(draw, prompt), output) for _ in range(num_requests)]


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "L1": lambda: equal_lengths(1),
    "L64": lambda: equal_lengths(64),
    "W1": chat_like,
    "W2": shared_prefix,
    "W3": long_prompts,
    "S256": lambda: equal_lengths(256, prompt=128, output=400, seed=256),
}
"""S256 are 256 requests of equal lengths, whose decode is steady."""


def _log_normal_lengths(
    draw: np.random.Generator, count: int, mean: int, sigma: float, shortest: int, longest: int
) -> list[int]:
    normals = draw.standard_normal(count)
    scale = float(mean)
    lengths = normals
    for _ in range(50):  # clipping moves the mean: scale until it is right
        lengths = np.clip(np.rint(scale * np.exp(sigma * normals - sigma * sigma / 2)), shortest, longest)
        found = float(lengths.mean())
        if abs(found - mean) < 0.005 * mean:
            break
        scale *= mean / found
    return [int(length) for length in lengths]


def _token_ids(draw: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = draw.integers(*TOKEN_IDS, size=count).tolist()
    return ids
