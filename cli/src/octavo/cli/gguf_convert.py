"""Turns a GGUF file into a Hugging Face folder: config, fp32 safetensors, tokenizer.

Rows of `attn_q` and `attn_k` of llama files are stored in the order of llama.cpp's rotary embedding, in which the two
halves of a head are interleaved. They are put back here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from octavo.cli.gguf_tokenizer import build_tokenizer, tokenizer_config
from octavo.cli.model_errors import UnsupportedModelError
from octavo.cli.progress import Progress
from octavo.cli.safetensors_writer import write_safetensors

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

_OUTER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def convert_gguf(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `source` into the existing, empty `folder`.

    Raises UnsupportedModelError if the file is not GGUF, or holds a model that cannot be converted.
    """
    progress(f"reading {source.name}")
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise UnsupportedModelError(f"{source} is not a whole GGUF file: {error}") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = hugging_face_config(metadata, {tensor.name for tensor in reader.tensors})
        tensors = _by_hugging_face_name(reader, config["num_hidden_layers"])
        progress("building the tokenizer")
        tokenizer = build_tokenizer(metadata)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source.name} cannot be converted: {error}") from error
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
    _write_json(folder / "generation_config.json", _token_ids(metadata))
    _write_json(folder / "config.json", config)
    shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in tensors.items()}
    write_safetensors(folder / "model.safetensors", shapes, _dequantized(tensors, config, progress))


def hugging_face_config(metadata: Mapping[str, Any], tensor_names: set[str]) -> dict[str, Any]:
    """The content of config.json. Raises UnsupportedModelError for what the Llama family's decoder lacks."""
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"its architecture is {architecture!r}; those that can be converted are {', '.join(_ARCHITECTURES)}"
        )
    if f"{architecture}.expert_count" in metadata:
        raise UnsupportedModelError("it is a mixture of experts")
    if "rope_freqs.weight" in tensor_names or metadata.get(f"{architecture}.rope.scaling.type", "none") != "none":
        raise UnsupportedModelError("its rotary embedding is scaled; use the model's safetensors folder instead")

    if architecture == "llama" and any(name.endswith(".bias") for name in tensor_names):
        raise UnsupportedModelError("its layers have biases, which a llama model does not")

    def field(name: str) -> Any:
        try:
            return metadata[f"{architecture}.{name}"]
        except KeyError:
            raise UnsupportedModelError(f"it has no field {architecture}.{name}") from None

    num_heads = field("attention.head_count")
    hidden_size = field("embedding_length")
    return {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get(f"{architecture}.attention.head_count_kv", num_heads),
        "head_dim": metadata.get(f"{architecture}.rope.dimension_count", hidden_size // num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get(f"{architecture}.rope.freq_base", 10000.0),
        "attention_bias": architecture == "qwen2",
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "dtype": "float32",
        **_token_ids(metadata),
    }


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    fields = {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    return {name: metadata[field] for name, field in fields.items() if field in metadata}


def _by_hugging_face_name(reader: GGUFReader, num_layers: int) -> dict[str, ReaderTensor]:
    tensors = {_hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    wanted = [f"model.layers.{n}.{part}.weight" for n in range(num_layers) for part in _LAYER_TENSORS.values()]
    missing = [name for name in ("model.embed_tokens.weight", "model.norm.weight", *wanted) if name not in tensors]
    if missing:
        raise UnsupportedModelError(f"it lacks {len(missing)} tensors, {missing[0]} first")
    return tensors


def _hugging_face_name(name: str) -> str:
    if name in _OUTER_TENSORS:
        return _OUTER_TENSORS[name]
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER_TENSORS:
        raise UnsupportedModelError(f"it has a tensor {name}, which the Llama family does not")
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.{match[3]}"


def _dequantized(
    tensors: Mapping[str, ReaderTensor], config: Mapping[str, Any], progress: Progress
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Each tensor in fp32 under its Hugging Face name, in order."""
    is_llama = config["model_type"] == "llama"
    heads_of = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for done, (name, tensor) in enumerate(tensors.items()):
        progress("converting weights", done / len(tensors))
        try:
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"tensor {tensor.name}: {error}") from error
        match = _LAYER_NAME.fullmatch(tensor.name)
        if is_llama and match is not None and match[2] in heads_of:
            values = halves_apart(values, heads_of[match[2]])
        yield name, values
    progress("converting weights", 1.0)


def halves_apart(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the interleaving of the two halves of each head: rows 0, 2, 4... of a head first, then 1, 3, 5...

    `rows` is [num_heads * head_dim, ...].
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [num_heads, head_dim / 2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
