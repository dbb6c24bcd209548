"""Rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.worker.models.config import RopeConfig


class Rotary:
    """Turns queries and keys by their positions, halves of the head paired."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)  # [head_dim / 2]

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for `turn_`, once a step: each [num_tokens, 1, head_dim].

        The first half of sin is negated, so that a roll by half a head stands for the rotation.
        """
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]


def turn_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `heads` [num_tokens, num_heads, head_dim] in place."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads.mul_(cos).addcmul_(swapped, sin)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position for each pair of a head: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _scale_long_waves(rope, frequencies)
    return frequencies


def _scale_long_waves(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3: waves that the trained context holds rarely are stretched by `factor`, those in between in part."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the trained context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / rope.factor
