"""Builds a decoder from a folder of safetensors files. Pickled checkpoints are never opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.worker.free_memory import free_host_bytes
from octavo.worker.models.config import ModelConfig, read_model_config
from octavo.worker.models.decoder import Decoder, DecoderLayer
from octavo.worker.models.errors import (
    MissingTensorError,
    ModelLoadError,
    TensorShapeError,
    UnexpectedTensorError,
    name_some,
)
from octavo.worker.models.linear import Linear, can_pack, make_linear

INDEX = "model.safetensors.index.json"
MAX_SHARE_OF_FREE_MEMORY = 0.2
"""Of the host's, that the weights of a model may take to be kept in two layouts."""
OUTPUT = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"

Shape = tuple[int, ...]
Progress = Callable[[float], None]
"""Told the share of bytes that are loaded, 0 to 1."""


def load_decoder(
    folder: Path, dtype: torch.dtype, device: torch.device, progress: Progress = lambda share: None
) -> Decoder:
    """Read the model in `folder`. Raises ModelLoadError, or a subclass that names the tensors or setting at fault."""
    config = read_model_config(folder)
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack, dtype, device, progress)
        if config.tied_embeddings is None:
            config = replace(config, tied_embeddings=OUTPUT not in checkpoint.names)
        checkpoint.compare(expected_tensors(config), ignored={OUTPUT} if config.tied_embeddings else set())
        return build_decoder(config, checkpoint)


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Names and shapes of all tensors that the decoder needs, as Hugging Face checkpoints name them."""
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, key_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    expected: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_embeddings:
        expected[OUTPUT] = (config.vocab_size, hidden)
    matrices = {
        "self_attn.q_proj": (query_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (key_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (key_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query_size, config.output_bias),
        "mlp.gate_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.up_proj": (config.intermediate_size, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, config.intermediate_size, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        expected |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, has_bias) in matrices.items():
            expected[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                expected[f"{prefix}{name}.bias"] = (rows,)
    return expected


class Checkpoint:
    """The open safetensors files of one model folder."""

    def __init__(
        self, folder: Path, stack: ExitStack, dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        self._dtype, self._device, self._progress = dtype, device, progress
        self._files: dict[str, Any] = {}
        for path in _safetensors_files(folder):
            try:
                opened = stack.enter_context(safe_open(path, framework="pt", device=str(device)))
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
            self._files |= dict.fromkeys(opened.keys(), opened)
        self._num_loaded, self._num_expected = 0, 1
        self.has_room_for_two = False
        """Weights may be kept in two layouts, each for the number of rows that it suits."""

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def compare(self, expected: dict[str, Shape], ignored: set[str]) -> None:
        """Raise if a tensor is missing, not expected, or of another shape; before any is loaded."""
        if missing := expected.keys() - self.names:
            raise MissingTensorError(f"the checkpoint lacks {name_some(missing)}")
        extra = {name for name in self.names - expected.keys() - ignored if not name.endswith("rotary_emb.inv_freq")}
        if extra:
            raise UnexpectedTensorError(f"the checkpoint has tensors that the model does not use: {name_some(extra)}")
        for name, shape in expected.items():
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found != shape:
                raise TensorShapeError(f"{name} is {list(found)} in the checkpoint, {list(shape)} by config.json")
        self._num_expected = sum(torch.Size(shape).numel() for shape in expected.values())
        num_bytes = self._num_expected * self._dtype.itemsize
        self.has_room_for_two = (
            can_pack(self._dtype, self._device) and num_bytes <= MAX_SHARE_OF_FREE_MEMORY * free_host_bytes()
        )

    def load(self, *names: str) -> Tensor:
        """The tensors, joined along their first dimension, in memory of our own."""
        parts = [self._files[name].get_tensor(name) for name in names]
        joined = torch.empty(
            (sum(len(part) for part in parts), *parts[0].shape[1:]), dtype=self._dtype, device=self._device
        )
        torch.cat([part.to(self._device, self._dtype) for part in parts], out=joined)
        self._num_loaded += joined.numel()
        self._progress(self._num_loaded / self._num_expected)
        return joined


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index} cannot be read: {error!r}") from error
        if odd := {name for name in names if Path(name).name != name or not name.endswith(".safetensors")}:
            raise ModelLoadError(f"{index} names files that are no safetensors files beside it: {name_some(odd)}")
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no *.safetensors file; other formats must be converted first")
    return files


class Weights(Protocol):
    """Where a decoder's tensors come from."""

    has_room_for_two: bool
    """There is memory for a second copy of each matrix."""

    def load(self, *names: str) -> Tensor:
        """The tensors, joined along their first dimension, in memory of our own."""


def build_decoder(config: ModelConfig, checkpoint: Weights) -> Decoder:
    """The decoder that `config` describes."""
    embedding = checkpoint.load(EMBEDDING)
    output = embedding if config.tied_embeddings else checkpoint.load(OUTPUT)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=[_build_layer(config, checkpoint, f"model.layers.{layer}.") for layer in range(config.num_layers)],
        norm=checkpoint.load("model.norm.weight"),
        output=make_linear(output, single=output.t()),
    )


def _build_layer(config: ModelConfig, checkpoint: Weights, prefix: str) -> DecoderLayer:
    def linear(has_bias: bool, *names: str) -> Linear:
        weight = checkpoint.load(*(f"{prefix}{name}.weight" for name in names))
        bias = checkpoint.load(*(f"{prefix}{name}.bias" for name in names)) if has_bias else None
        return make_linear(weight, bias, weight.t().contiguous() if checkpoint.has_room_for_two else None)

    def norm(name: str) -> Tensor:
        return checkpoint.load(f"{prefix}{name}.weight")

    return DecoderLayer(
        input_norm=norm("input_layernorm"),
        qkv=linear(config.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        query_norm=norm("self_attn.q_norm") if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        output=linear(config.output_bias, "self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(config.mlp_bias, "mlp.down_proj"),
    )
