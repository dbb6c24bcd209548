"""What a decoder must know of a model, read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.worker.attention import LayerAttention
from octavo.worker.models.errors import ModelLoadError, UnknownArchitectureError
from octavo.worker.models.model_json import read_eos_token_ids, read_json
from octavo.worker.models.rope_config import RopeConfig, read_ropes

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
"""model_type |-> architecture. Converters may write only one of the two into config.json."""
GEMMAS = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
GEMMA_HEAD_DIM = 256
GEMMA_WINDOW = 4096
GEMMA3_PATTERN = 6
"""Every so many layers of Gemma 3 one sees all positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What serving needs to know of a model, whoever computes it."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: tuple[LayerAttention, ...]
    """For each layer."""
    ropes: tuple[RopeConfig | None, ...]
    """For each layer: how attention turns queries and keys. None: it does not."""
    norm_eps: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Type of the checkpoint, a name of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Shapes and switches of one decoder of our own."""

    hidden_size: int
    intermediate_size: int
    activation: str
    """Of the gate: `silu` or `gelu_pytorch_tanh`."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    post_norms: bool
    """What attention and MLP add to the residual is normalised too."""
    norms_add_one: bool
    """Norm weights are stored less one, and applied in float32."""
    fused_projections: bool
    """The checkpoint keeps query, key and value, and gate and up, in one tensor each."""
    scaled_embedding: bool
    """Embeddings are multiplied by the root of hidden_size."""
    logit_cap: float
    """Logits stay within +- this, by tanh. 0: they are as they are."""
    tied_embeddings: bool | None
    """The output layer is the embedding. None: config.json is silent, the checkpoint's tensors decide."""


def read_model_config(folder: Path, max_model_len: int | None = None) -> DecoderConfig:
    """Read `folder`/config.json and generation_config.json, for sequences of up to `max_model_len` tokens.

    Raises ModelLoadError if there is no readable config, UnknownArchitectureError if it asks for something that no
    decoder here computes.
    """
    values = read_json(folder / "config.json")
    try:
        return _parse(values, read_eos_token_ids(folder, values), max_model_len)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{folder / 'config.json'} lacks or garbles a setting: {error!r}") from error


def _parse(values: dict[str, Any], eos_token_ids: tuple[int, ...], max_model_len: int | None) -> DecoderConfig:
    architecture = _architecture(values)
    is_gemma, is_qwen2 = architecture in GEMMAS, architecture == "Qwen2ForCausalLM"
    num_heads, hidden_size = int(values["num_attention_heads"]), int(values["hidden_size"])
    num_kv_heads = int(values.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise UnknownArchitectureError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = int(values.get("head_dim") or (GEMMA_HEAD_DIM if is_gemma else hidden_size // num_heads))
    if head_dim % 2:
        raise UnknownArchitectureError(f"rotary embedding needs an even head_dim, this one is {head_dim}")
    attention_bias = architecture != "Phi3ForCausalLM" and bool(values.get("attention_bias", False))
    num_layers = int(values["num_hidden_layers"])
    is_sliding = _sliding_layers(architecture, values, num_layers)
    num_positions = _num_positions(values)
    ropes = read_ropes(architecture, values, head_dim, is_sliding, max_model_len or num_positions)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=int(values["vocab_size"]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        attention=_attention(architecture, values, head_dim, is_sliding, max_model_len or num_positions),
        ropes=ropes,
        norm_eps=float(values.get("rms_norm_eps", 1e-5 if architecture == "Phi3ForCausalLM" else 1e-6)),
        max_position_embeddings=num_positions,
        eos_token_ids=eos_token_ids,
        dtype=str(values.get("dtype") or values.get("torch_dtype") or "float32").removeprefix("torch."),
        hidden_size=hidden_size,
        intermediate_size=int(values["intermediate_size"]),
        activation=_activation(values, is_gemma),
        qkv_bias=is_qwen2 or attention_bias,
        output_bias=not is_qwen2 and attention_bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        post_norms=architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
        norms_add_one=is_gemma,
        fused_projections=architecture == "Phi3ForCausalLM",
        scaled_embedding=is_gemma,
        logit_cap=_cap(architecture, values, "final_logit_softcapping", 30.0),
        tied_embeddings=values.get("tie_word_embeddings"),
    )


def _architecture(values: dict[str, Any]) -> str:
    named = list(values.get("architectures") or [ARCHITECTURES.get(str(values.get("model_type")))])
    for architecture in named:
        if architecture in ARCHITECTURES.values():
            return str(architecture)
    found = ", ".join(str(name) for name in named if name) or f"of model_type {values.get('model_type')!r}"
    raise UnknownArchitectureError(f"architecture {found} is not one of {', '.join(ARCHITECTURES.values())}")


def _activation(values: dict[str, Any], is_gemma: bool) -> str:
    expected = "gelu_pytorch_tanh" if is_gemma else "silu"
    found = values.get("hidden_activation") or values.get("hidden_act") or expected
    if found != expected:
        raise UnknownArchitectureError(f"activation {found!r} is not {expected}")
    return expected


def _num_positions(values: dict[str, Any]) -> int:
    """Of YaRN, that of the stretched context: some checkpoints leave max_position_embeddings as it was before."""
    trained = int(values["max_position_embeddings"])
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    if "yarn" not in (rope.get("rope_type"), rope.get("type")) or not rope.get("factor"):
        return trained
    return max(trained, int(float(rope["factor"]) * int(rope.get("original_max_position_embeddings") or trained)))


def _attention(
    architecture: str, values: dict[str, Any], head_dim: int, is_sliding: tuple[bool, ...], max_model_len: int
) -> tuple[LayerAttention, ...]:
    if values.get("use_bidirectional_attention"):
        raise UnknownArchitectureError("use_bidirectional_attention: tokens would see later ones")
    scaled_by = values.get("query_pre_attn_scalar", GEMMA_HEAD_DIM) if architecture in GEMMAS[1:] else head_dim
    soft_cap = _cap(architecture, values, "attn_logit_softcapping", 50.0)
    window = int(values.get("sliding_window", GEMMA_WINDOW if architecture in GEMMAS else None) or 0)
    if any(is_sliding) and window < 1:
        raise UnknownArchitectureError(f"sliding_window {values.get('sliding_window')} is not positive")
    return tuple(
        LayerAttention(
            scale=float(scaled_by) ** -0.5,
            window=window if slides and window < max_model_len else None,
            soft_cap=soft_cap if architecture == "Gemma2ForCausalLM" else 0.0,
        )
        for slides in is_sliding
    )


def _cap(architecture: str, values: dict[str, Any], name: str, default: float) -> float:
    """A soft cap of Gemma: where config.json is silent, Gemma 2 has the default and others have none."""
    if architecture not in GEMMAS[1:]:
        return 0.0
    return float(values.get(name, default if architecture == "Gemma2ForCausalLM" else None) or 0.0)


def _sliding_layers(architecture: str, values: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    if architecture in ("LlamaForCausalLM", "GemmaForCausalLM"):
        return (False,) * num_layers
    if architecture in ("MistralForCausalLM", "Phi3ForCausalLM"):
        return (values.get("sliding_window") is not None,) * num_layers
    if architecture in GEMMAS:
        pattern = values.get("sliding_window_pattern") or values.get("_sliding_window_pattern") or GEMMA3_PATTERN
        every = 2 if architecture == "Gemma2ForCausalLM" else int(pattern)
        default = tuple((layer + 1) % every != 0 for layer in range(num_layers))
    else:
        if values.get("sliding_window") is None or not values.get("use_sliding_window", False):
            return (False,) * num_layers
        if architecture == "SmolLM3ForCausalLM":
            default = tuple(not turns for turns in values.get("no_rope_layers") or ())
        else:
            first_with_window = int(values.get("max_window_layers", num_layers))
            default = tuple(layer >= first_with_window for layer in range(num_layers))
    kinds = values.get("layer_types")
    if kinds and (odd := set(kinds) - {"sliding_attention", "full_attention"}):
        raise UnknownArchitectureError(f"layer_types has {', '.join(sorted(map(str, odd)))}")
    found = tuple(kind == "sliding_attention" for kind in kinds) if kinds else default
    if len(found) != num_layers:
        raise UnknownArchitectureError(f"layer_types has {len(found)} entries for {num_layers} layers")
    return found
