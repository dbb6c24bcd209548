"""How positions turn queries and keys, read from config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.worker.models.errors import UnknownArchitectureError

LOCAL_THETA = 10_000.0
"""Base of the sliding layers of Gemma 3, where config.json is silent."""
DEFAULT_THETAS = {"SmolLM3ForCausalLM": 2_000_000.0, "Gemma3ForCausalLM": 1_000_000.0}
NOPE_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one layer or more."""

    theta: float
    kind: str = "default"
    """`default`, `linear`, `llama3`, `yarn`, `longrope`, or `dynamic` (`default` up to the trained length)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YaRN: the bounds of its ramp are whole pairs."""
    wave_factors: tuple[float, ...] = ()
    """LongRoPE: what stretches the wave of each pair, of the short or the long list, as max_model_len asks."""
    attention_factor: float = 1.0
    """Of cosines and sines: YaRN and LongRoPE grow scores with the context."""


def read_ropes(
    architecture: str, values: dict[str, Any], head_dim: int, is_sliding: Sequence[bool], max_model_len: int
) -> tuple[RopeConfig | None, ...]:
    """One for each layer; None: the layer does not look at positions.

    Reads both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`. Raises
    UnknownArchitectureError, which names the setting.
    """
    if architecture == "Gemma3ForCausalLM":
        local, everywhere = _gemma3_ropes(values, head_dim, max_model_len)
        return tuple(local if slides else everywhere for slides in is_sliding)
    parameters = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    default_theta = DEFAULT_THETAS.get(architecture, LOCAL_THETA)
    theta = float(parameters.get("rope_theta") or values.get("rope_theta") or default_theta)
    rope = _rope(architecture, values, parameters, theta, head_dim, max_model_len)
    if architecture != "SmolLM3ForCausalLM":
        return (rope,) * len(is_sliding)
    interval = int(values.get("no_rope_layer_interval", NOPE_INTERVAL))
    turned = values.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(len(is_sliding))]
    return tuple(rope if turns else None for turns in turned[: len(is_sliding)])


def _gemma3_ropes(values: dict[str, Any], head_dim: int, max_model_len: int) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers with a window, and of those without."""
    name, spelled = "Gemma3ForCausalLM", values.get("rope_parameters") or {}
    local, everywhere = spelled.get("sliding_attention") or {}, spelled.get("full_attention") or {}
    everywhere = {**(values.get("rope_scaling") or {}), **everywhere}
    local_theta = float(local.get("rope_theta") or values.get("rope_local_base_freq") or LOCAL_THETA)
    theta = float(everywhere.get("rope_theta") or values.get("rope_theta") or DEFAULT_THETAS[name])
    return (
        _rope(name, values, local, local_theta, head_dim, max_model_len),
        _rope(name, values, everywhere, theta, head_dim, max_model_len),
    )


def _rope(
    architecture: str,
    values: dict[str, Any],
    parameters: dict[str, Any],
    theta: float,
    head_dim: int,
    max_model_len: int,
) -> RopeConfig:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if architecture == "Phi3ForCausalLM" and kind in ("su", "yarn"):  # former names
        kind = "longrope"
    if kind not in ("default", "linear", "llama3", "dynamic", "yarn", "longrope"):
        raise UnknownArchitectureError(
            f"rope type {kind!r} is not one of default, linear, llama3, dynamic, yarn, longrope"
        )
    rotated = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnknownArchitectureError(f"partial_rotary_factor {rotated} is not 1")
    trained = int(values["max_position_embeddings"])
    original = int(
        values.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings") or trained
    )
    factor = float(parameters.get("factor") or trained / original)
    wave_factors: tuple[float, ...] = ()
    if kind == "longrope":
        chosen = "long_factor" if max_model_len > original else "short_factor"
        wave_factors = tuple(float(one) for one in parameters[chosen])
        if 2 * len(wave_factors) != head_dim:
            raise ValueError(f"{chosen} has {len(wave_factors)} entries for a head_dim of {head_dim}")
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=original,
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        wave_factors=wave_factors,
        attention_factor=_attention_factor(kind, parameters, factor, original),
    )


def _attention_factor(kind: str, parameters: dict[str, Any], factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1.0 + math.log(factor) / math.log(original))
    scale, scale_of_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and scale_of_all:
        return _yarn_scale(factor, float(scale)) / _yarn_scale(factor, float(scale_of_all))
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0
