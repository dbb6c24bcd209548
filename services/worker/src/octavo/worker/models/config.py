"""What a decoder must know of a model, read from config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.worker.models.errors import ModelLoadError, UnknownArchitectureError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""model_type |-> architecture. Converters may write only one of the two into config.json."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn queries and keys."""

    theta: float
    kind: str = "default"
    """`default`, `linear`, `llama3`, or `dynamic` (which equals `default` up to the trained length)."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of one Llama-family decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    """For each layer: a query at position i sees keys at i - window + 1 to i. None: all up to i."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool | None
    """The output layer is the embedding. None: config.json is silent, the checkpoint's tensors decide."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Type of the checkpoint, a name of torch."""


def read_model_config(folder: Path) -> ModelConfig:
    """Read `folder`/config.json and generation_config.json.

    Raises ModelLoadError if there is no readable config, UnknownArchitectureError if it asks for something that no
    decoder here computes.
    """
    values = _read_json(folder / "config.json")
    try:
        return _parse(values, _eos_token_ids(folder, values))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{folder / 'config.json'} lacks or garbles a setting: {error!r}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist: is this a model folder?") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} does not hold an object")
    return values


def _parse(values: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    architecture = _architecture(values)
    num_heads, hidden_size = int(values["num_attention_heads"]), int(values["hidden_size"])
    num_kv_heads = int(values.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise UnknownArchitectureError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = int(values.get("head_dim") or hidden_size // num_heads)
    if head_dim % 2:
        raise UnknownArchitectureError(f"rotary embedding needs an even head_dim, this one is {head_dim}")
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise UnknownArchitectureError(f"activation {activation!r} is not silu")
    attention_bias = bool(values.get("attention_bias", False))
    num_layers = int(values["num_hidden_layers"])
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(values["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(values["intermediate_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=_rope(values),
        max_position_embeddings=int(values["max_position_embeddings"]),
        sliding_windows=_sliding_windows(architecture, values, num_layers),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=values.get("tie_word_embeddings"),
        eos_token_ids=eos_token_ids,
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _architecture(values: dict[str, Any]) -> str:
    named = list(values.get("architectures") or [ARCHITECTURES.get(str(values.get("model_type")))])
    for architecture in named:
        if architecture in ARCHITECTURES.values():
            return str(architecture)
    found = ", ".join(str(name) for name in named if name) or f"of model_type {values.get('model_type')!r}"
    raise UnknownArchitectureError(f"architecture {found} is not one of {', '.join(ARCHITECTURES.values())}")


def _rope(values: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    parameters = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind not in ("default", "linear", "llama3", "dynamic"):
        raise UnknownArchitectureError(f"rope type {kind!r} is not one of default, linear, llama3, dynamic")
    rotated = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if rotated != 1.0:
        raise UnknownArchitectureError(f"partial_rotary_factor {rotated} is not 1")
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(
            parameters.get("original_max_position_embeddings") or values["max_position_embeddings"]
        ),
    )


def _sliding_windows(architecture: str, values: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = values.get("sliding_window")
    if architecture == "LlamaForCausalLM" or window is None:
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * num_layers
    if not values.get("use_sliding_window", False):
        return (None,) * num_layers
    if layer_types := values.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    first_with_window = int(values.get("max_window_layers", num_layers))
    return tuple(int(window) if layer >= first_with_window else None for layer in range(num_layers))


def _eos_token_ids(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """Those of generation_config.json first, then those of config.json, each once."""
    generation = folder / "generation_config.json"
    found: list[int] = []
    for source in (_read_json(generation) if generation.exists() else {}, values):
        ids = source.get("eos_token_id")
        found += [] if ids is None else [ids] if isinstance(ids, int) else [int(one) for one in ids]
    return tuple(dict.fromkeys(found))
