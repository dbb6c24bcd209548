"""Rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.worker.models.rope_config import RopeConfig


class Rotary:
    """Turns queries and keys by their positions, halves of the head paired."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)  # [head_dim / 2]
        self._scale = rope.attention_factor

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for `turn_`, once a step: each [num_tokens, 1, head_dim].

        The first half of sin is negated, so that a roll by half a head stands for the rotation.
        """
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


def turn_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `heads` [num_tokens, num_heads, head_dim] in place."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads.mul_(cos).addcmul_(swapped, sin)


def cos_sin_table(rope: RopeConfig | None, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """float32 [num_positions, head_dim]: cosines of the half, then sines. Without a rope nothing turns."""
    if rope is None:
        ones = torch.ones((num_positions, head_dim // 2), dtype=torch.float32, device=device)
        return torch.cat((ones, torch.zeros_like(ones)), -1)
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    angles = torch.arange(num_positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1) * rope.attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position for each pair of a head: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _scale_long_waves(rope, frequencies)
    if rope.kind == "yarn":
        return _ramp(rope, frequencies)
    if rope.kind == "longrope":
        return frequencies / torch.tensor(rope.wave_factors, dtype=torch.float32)
    return frequencies


def _scale_long_waves(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3: waves that the trained context holds rarely are stretched by `factor`, those in between in part."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the trained context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor


def _ramp(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): as Llama 3, but the share that is stretched grows evenly from pair to pair."""
    num_pairs = len(frequencies)

    def pair_that_turns(times: float) -> float:
        trained = rope.original_max_position_embeddings
        return num_pairs * math.log(trained / (times * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(num_pairs, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies
