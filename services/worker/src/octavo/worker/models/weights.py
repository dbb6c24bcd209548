"""Builds a decoder from a folder of safetensors files."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from octavo.worker.free_memory import free_host_bytes
from octavo.worker.models.config import DecoderConfig, read_model_config
from octavo.worker.models.decoder import Decoder, DecoderLayer
from octavo.worker.models.errors import (
    MissingTensorError,
    ModelLoadError,
    TensorShapeError,
    UnexpectedTensorError,
    name_some,
)
from octavo.worker.models.fp8_linear import make_fp8_linear, to_rows_of_e4m3
from octavo.worker.models.linear import Linear, can_pack, make_linear
from octavo.worker.models.model_json import read_json
from octavo.worker.models.quantization import Fp8Weights, read_quantization
from octavo.worker.models.tensor_files import Shape, StoredTensor, TensorReader, open_tensor_files

MAX_SHARE_OF_FREE_MEMORY = 0.2
"""Of the host's, that the weights of a model may take to be kept in two layouts."""
NUM_GPU_READERS = 8
"""Threads that fill a GPU: its link takes what about eight of them copy out of the page cache."""
OUTPUT = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"

Progress = Callable[[float], None]
"""Told the share of bytes that are loaded, 0 to 1."""


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda share: None,
    max_model_len: int | None = None,
    quantize: bool = False,
) -> Decoder:
    """Read the model in `folder`; with `quantize`, round plain weights to e4m3.

    Raises ModelLoadError, or a subclass that names the tensors or setting at fault.
    """
    config = read_model_config(folder, max_model_len)
    with open_tensor_files(folder) as stored:
        checkpoint = Checkpoint(stored, dtype, device, progress)
        if config.tied_embeddings is None:
            config = replace(config, tied_embeddings=OUTPUT not in stored)
        quantization = read_quantization(read_json(folder / "config.json"))
        kv_scale_names = _kv_scale_names(config)
        ignored = {name for names in kv_scale_names for name in names} | ({OUTPUT} if config.tied_embeddings else set())
        checkpoint.compare(expected_tensors(config, quantization), ignored)
        if quantization is None and quantize:
            quantization = Fp8Weights(is_stored=False)
        decoder = build_decoder(config, checkpoint, quantization)
        decoder.kv_scales = _load_kv_scales(config, checkpoint, kv_scale_names)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return decoder


def expected_tensors(config: DecoderConfig, quantization: Fp8Weights | None = None) -> dict[str, Shape]:
    """Names and shapes of all tensors that the decoder needs, as Hugging Face checkpoints name them.

    `quantization` is that of the checkpoint.
    """
    hidden, head_dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    query_size, key_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    expected: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        expected[OUTPUT] = (config.vocab_size, hidden)
    names = TensorNames(config)
    qkv = dict(zip(names.qkv, (query_size, key_size, key_size), strict=False))
    gate_up = dict.fromkeys(names.gate_up, inner)
    if config.fused_projections:
        qkv, gate_up = {names.qkv[0]: query_size + 2 * key_size}, {names.gate_up[0]: 2 * inner}
    matrices = {name: (rows, hidden, config.qkv_bias) for name, rows in qkv.items()}
    matrices |= {name: (rows, hidden, config.mlp_bias) for name, rows in gate_up.items()}
    matrices[names.output] = (hidden, query_size, config.output_bias)
    matrices[names.down] = (hidden, inner, config.mlp_bias)
    norms = dict.fromkeys((names.input_norm, names.mlp_norm), hidden)
    if config.post_norms:
        norms |= dict.fromkeys((names.output_norm, names.down_norm), hidden)
    if config.qk_norm:
        norms |= dict.fromkeys((names.query_norm, names.key_norm), head_dim)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        expected |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, has_bias) in matrices.items():
            expected[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                expected[f"{prefix}{name}.bias"] = (rows,)
            if quantization is not None and quantization.covers([f"{prefix}{name}"]):
                expected[f"{prefix}{name}.weight_scale"] = (rows, 1)
    return expected


class TensorNames:
    """What a layer's tensors are called in the checkpoint, after `model.layers.N.`."""

    def __init__(self, config: DecoderConfig) -> None:
        fused = config.fused_projections
        self.qkv = ("self_attn.qkv_proj",) if fused else tuple(f"self_attn.{part}_proj" for part in "qkv")
        self.gate_up = ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj")
        self.output, self.down = "self_attn.o_proj", "mlp.down_proj"
        self.query_norm, self.key_norm = "self_attn.q_norm", "self_attn.k_norm"
        self.input_norm = "input_layernorm"
        # Where what is added to the residual is normalised too, the name of the MLP's norm stands for another.
        self.mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        self.output_norm, self.down_norm = "post_attention_layernorm", "post_feedforward_layernorm"


class Checkpoint:
    """The open safetensors files of one model folder. Several threads may load at once."""

    def __init__(
        self, stored: dict[str, StoredTensor], dtype: torch.dtype, device: torch.device, progress: Progress
    ) -> None:
        self._stored, self._device, self._progress = stored, device, progress
        self.dtype = dtype
        self._reader = TensorReader(device)
        self._num_loaded, self._num_expected = 0, 1
        self._lock = threading.Lock()  # of the count above, and of the order of reports
        self.num_readers = NUM_GPU_READERS if device.type == "cuda" else 1
        self.has_room_for_two = False
        """Weights may be kept in two layouts, each for the number of rows that it suits."""

    def compare(self, expected: dict[str, Shape], ignored: set[str]) -> None:
        """Raise if a tensor is missing, not expected, or of another shape; before any is loaded."""
        names = self._stored.keys()
        if missing := expected.keys() - names:
            raise MissingTensorError(f"the checkpoint lacks {name_some(missing)}")
        extra = {name for name in names - expected.keys() - ignored if not name.endswith("rotary_emb.inv_freq")}
        if extra:
            raise UnexpectedTensorError(f"the checkpoint has tensors that the model does not use: {name_some(extra)}")
        for name, shape in expected.items():
            found = self._stored[name].shape
            if found != shape:
                raise TensorShapeError(f"{name} is {list(found)} in the checkpoint, {list(shape)} by config.json")
        self._num_expected = sum(torch.Size(shape).numel() for shape in expected.values())
        num_bytes = self._num_expected * self.dtype.itemsize
        self.has_room_for_two = (
            can_pack(self.dtype, self._device) and num_bytes <= MAX_SHARE_OF_FREE_MEMORY * free_host_bytes()
        )

    def load(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """See Weights."""
        parts = [self._stored[name] for name in names]
        for name, part in zip(names, parts, strict=True):
            if (part.dtype == torch.float8_e4m3fn) != (dtype == torch.float8_e4m3fn):
                found = str(part.dtype).removeprefix("torch.")
                raise ModelLoadError(f"{name} is stored as {found}, which its quantization_config contradicts")
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        joined = torch.empty(shape, dtype=dtype or self.dtype, device=self._device)
        first = 0
        for part in parts:
            self._reader.read(part, joined[first : first + part.shape[0]])
            first += part.shape[0]
        with self._lock:
            self._num_loaded += joined.numel()
            self._progress(self._num_loaded / self._num_expected)
        return joined

    def load_scale(self, name: str) -> Tensor:
        """A tensor of any shape: float32, on the device, its elements in a row. Raises MissingTensorError."""
        if name not in self._stored:
            raise MissingTensorError(f"the checkpoint lacks {name}")
        found = torch.empty(self._stored[name].shape, dtype=torch.float32, device=self._device)
        self._reader.read(self._stored[name], found)
        return found.view(-1)

    def has_any(self, names: Iterable[str]) -> bool:
        return not self._stored.keys().isdisjoint(names)


def _kv_scale_names(config: DecoderConfig) -> list[tuple[str, str]]:
    """For each layer, what the scales of K and of V are called."""
    prefixes = (f"model.layers.{layer}.self_attn." for layer in range(config.num_layers))
    return [(f"{prefix}k_scale", f"{prefix}v_scale") for prefix in prefixes]


def _load_kv_scales(config: DecoderConfig, checkpoint: Checkpoint, names: list[tuple[str, str]]) -> Tensor | None:
    """float32 [num_layers, 2, num_kv_heads], from tensors of one or num_kv_heads elements; None if there are none."""
    if not checkpoint.has_any(name for pair in names for name in pair):
        return None
    scales = []
    for name in (name for pair in names for name in pair):
        scale = checkpoint.load_scale(name)
        if len(scale) not in (1, config.num_kv_heads):
            raise TensorShapeError(f"{name} has {len(scale)} elements, neither one nor one for each KV head")
        if not bool((scale > 0).all()):
            raise ModelLoadError(f"{name} is not positive")
        scales.append(scale.expand(config.num_kv_heads))
    return torch.stack(scales).view(config.num_layers, 2, config.num_kv_heads)


class Weights(Protocol):
    """Where a decoder's tensors come from."""

    has_room_for_two: bool
    """There is memory for a second copy of each matrix."""
    num_readers: int
    """Threads that may load at once."""
    dtype: torch.dtype
    """The model's."""

    def load(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensors, joined along their first dimension, in memory of our own, of the model's type or `dtype`."""


def build_decoder(config: DecoderConfig, checkpoint: Weights, quantization: Fp8Weights | None = None) -> Decoder:
    """The decoder that `config` describes, its layers' matrices e4m3 where `quantization` says so."""
    with ThreadPoolExecutor(checkpoint.num_readers, "load") as pool:
        # The largest tensors first: at the end no thread is left alone with one.
        embedding = pool.submit(checkpoint.load, EMBEDDING)
        output = embedding if config.tied_embeddings else pool.submit(checkpoint.load, OUTPUT)
        layers = [
            pool.submit(_build_layer, config, checkpoint, quantization, f"model.layers.{layer}.")
            for layer in range(config.num_layers)
        ]
        try:
            return Decoder(
                config=config,
                layers=[layer.result() for layer in layers],
                embedding=embedding.result(),
                norm=_load_norm(config, checkpoint, FINAL_NORM),
                output=make_linear(output.result(), single=output.result().t()),
            )
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _load_norm(config: DecoderConfig, checkpoint: Weights, name: str) -> Tensor:
    return checkpoint.load(name, dtype=torch.float32).add_(1.0) if config.norms_add_one else checkpoint.load(name)


def _load_e4m3(checkpoint: Weights, is_stored: bool, modules: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Matrices joined along their outputs, and float32 scales [out_features, 1]."""
    weights = [f"{module}.weight" for module in modules]
    if not is_stored:
        return to_rows_of_e4m3(checkpoint.load(*weights))
    stored = checkpoint.load(*weights, dtype=torch.float8_e4m3fn)
    return stored, checkpoint.load(*(f"{module}.weight_scale" for module in modules), dtype=torch.float32)


def _build_layer(
    config: DecoderConfig, checkpoint: Weights, quantization: Fp8Weights | None, prefix: str
) -> DecoderLayer:
    def linear(has_bias: bool, *names: str) -> Linear:
        modules = [f"{prefix}{name}" for name in names]
        bias = checkpoint.load(*(f"{module}.bias" for module in modules)) if has_bias else None
        if quantization is not None and quantization.covers(modules):
            weight, scales = _load_e4m3(checkpoint, quantization.is_stored, modules)
            return make_fp8_linear(weight, scales, bias, checkpoint.dtype)
        weight = checkpoint.load(*(f"{module}.weight" for module in modules))
        return make_linear(weight, bias, weight.t().contiguous() if checkpoint.has_room_for_two else None)

    def norm(name: str) -> Tensor:
        return _load_norm(config, checkpoint, f"{prefix}{name}.weight")

    names = TensorNames(config)
    return DecoderLayer(
        input_norm=norm(names.input_norm),
        qkv=linear(config.qkv_bias, *names.qkv),
        query_norm=norm(names.query_norm) if config.qk_norm else None,
        key_norm=norm(names.key_norm) if config.qk_norm else None,
        output=linear(config.output_bias, names.output),
        output_norm=norm(names.output_norm) if config.post_norms else None,
        mlp_norm=norm(names.mlp_norm),
        gate_up=linear(config.mlp_bias, *names.gate_up),
        down=linear(config.mlp_bias, names.down),
        down_norm=norm(names.down_norm) if config.post_norms else None,
    )
