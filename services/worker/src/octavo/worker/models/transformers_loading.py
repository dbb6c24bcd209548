"""Loads models of transformers that our attention serves, and refuses all others. Code of a checkpoint is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from octavo.worker.attention import AttentionMetadata
from octavo.worker.attention_torch import TorchAttention
from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.models.config import ModelConfig
from octavo.worker.models.errors import (
    MissingTensorError,
    ModelLoadError,
    UnexpectedTensorError,
    UnknownArchitectureError,
    name_some,
)
from octavo.worker.models.model_folder import ModelFolder
from octavo.worker.models.model_json import read_eos_token_ids, read_json
from octavo.worker.models.tensor_files import tensor_paths
from octavo.worker.models.transformers_model import ATTENTION, Attender, TransformersModel
from octavo.worker.models.weights import Progress

AUTO_MODEL: Any = transformers.AutoModelForCausalLM
CHECK_LENS = (23, 18)
"""Tokens of the two sequences by which a loaded model is compared with transformers' own attention."""
CHECK_BLOCK = 8
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_OF_SHORT_TYPES = 0.1
"""Relative error of the logits in the norm. What is left out or mixed up gives more."""


class TransformersFolder(ModelFolder):
    """A model folder that transformers can read."""

    def __init__(self, folder: Path, max_model_len: int | None) -> None:
        """Reads the configuration only. Raises ModelLoadError."""
        self._folder = folder
        try:
            self._config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever transformers or the code of a configuration class finds wrong
            raise UnknownArchitectureError(f"transformers cannot read {folder / 'config.json'}: {error}") from error
        if type(self._config) not in AUTO_MODEL._model_mapping:
            raise UnknownArchitectureError(f"{self._config.model_type!r} is no causal language model of transformers")
        trained = getattr(self._config, "max_position_embeddings", None)
        if not isinstance(trained, int):
            raise UnknownArchitectureError(f"{self._config.model_type!r} does not say how many positions it has")
        self.max_position_embeddings = trained
        self.dtype = str(getattr(self._config, "dtype", None) or "float32").removeprefix("torch.")
        _check_config(self._config, max_model_len or trained)

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda share: None,
        *,
        is_dummy: bool = False,
        quantize: bool = False,
    ) -> CausalLm:
        """See ModelFolder. What our attention makes of some tokens is compared with what transformers' own does."""
        if quantize or getattr(self._config, "quantization_config", None) is not None:
            raise UnknownArchitectureError(f"weights of {self._config.model_type!r} are not served quantized")
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        model = self._make(dtype) if is_dummy else self._read(dtype)
        model = model.eval().to(device)
        progress(0.9)
        attender = Attender()
        for module in model.modules():
            module.octavo_attender = attender
        with torch.inference_mode():
            try:
                expected = [_reference_logits(model, tokens) for tokens in _check_tokens(model.config.vocab_size)]
                model.set_attn_implementation(ATTENTION)
                token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
                output = model.get_decoder()(input_ids=token, position_ids=token, use_cache=False)
                config = self._describe(type(model).__name__, len(expected[0]), attender)
                served = TransformersModel(config, model, attender, type(output))
                found = _our_logits(served)
            except ModelLoadError:
                raise
            except Exception as error:  # code of any model, in a way it was not written for
                raise UnknownArchitectureError(f"{type(model).__name__} does not run in steps: {error!r}") from error
        for one, other in zip(found, expected, strict=True):
            share = float((one - other).norm() / other.norm())
            if not share <= TOLERANCE.get(dtype, TOLERANCE_OF_SHORT_TYPES):
                raise UnknownArchitectureError(
                    f"{type(model).__name__} gives other logits in steps than as a whole (by {share:.1%}): "
                    "it has states other than keys and values, or attention that no kernel here computes"
                )
        progress(1.0)
        return served

    def _make(self, dtype: torch.dtype) -> Any:
        return AUTO_MODEL.from_config(self._config, dtype=dtype, trust_remote_code=False, attn_implementation="eager")

    def _read(self, dtype: torch.dtype) -> Any:
        tensor_paths(self._folder)  # transformers would follow an index out of the folder
        try:
            model, found = AUTO_MODEL.from_pretrained(
                self._folder,
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # whatever transformers finds wrong with the files
            raise ModelLoadError(f"transformers cannot load {self._folder}: {error}") from error
        if missing := [*found["missing_keys"], *found["mismatched_keys"]]:
            raise MissingTensorError(f"the checkpoint lacks, or has in another shape, {name_some(map(str, missing))}")
        if extra := found["unexpected_keys"]:
            raise UnexpectedTensorError(
                f"the checkpoint has tensors that the model does not use: {name_some(map(str, extra))}"
            )
        return model

    def _describe(self, name: str, vocab_size: int, attender: Attender) -> ModelConfig:
        """By what the layers asked of attention for one token."""
        num_layers = int(self._config.num_hidden_layers)
        calls = {call.layer: call for call in attender.calls}
        if len(attender.calls) != num_layers or sorted(calls) != list(range(num_layers)):
            raise UnknownArchitectureError(
                f"{name} has {num_layers} layers, of which {len(calls)} use transformers' attention interface"
            )
        if len({(call.num_heads, call.num_kv_heads, call.head_dim) for call in attender.calls}) != 1:
            raise UnknownArchitectureError(f"layers of {name} have heads of different number or size")
        attention = tuple(calls[layer].how for layer in range(num_layers))
        kinds = getattr(self._config, "layer_types", None) or ()
        for layer, kind in enumerate(kinds[:num_layers]):
            if (kind == "sliding_attention") != (attention[layer].window is not None):
                raise UnknownArchitectureError(f"layer {layer} of {name} does not tell attention its window")
        return ModelConfig(
            architecture=name,
            vocab_size=vocab_size,
            num_layers=num_layers,
            num_heads=calls[0].num_heads,
            num_kv_heads=calls[0].num_kv_heads,
            head_dim=calls[0].head_dim,
            attention=attention,
            ropes=(None,) * num_layers,
            norm_eps=0.0,
            max_position_embeddings=self.max_position_embeddings,
            eos_token_ids=read_eos_token_ids(self._folder, read_json(self._folder / "config.json")),
            dtype=self.dtype,
        )


def _check_config(config: Any, max_model_len: int) -> None:
    if odd := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        raise UnknownArchitectureError(f"layer_types has {', '.join(sorted(map(str, odd)))}")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *ropes.values()]:
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limit = int(rope.get("original_max_position_embeddings") or 0)
            if max_model_len > limit:
                # transformers would turn all tokens of a step by what its longest sequence needs.
                raise UnknownArchitectureError(
                    f"longrope is served up to its trained length: set max_model_len={limit}"
                )


def _check_tokens(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in CHECK_LENS]


def _reference_logits(model: Any, token_ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=token_ids.to(model.device)[None], use_cache=False).logits[0, -1]
    return logits.float()


def _our_logits(model: TransformersModel) -> list[Tensor]:
    """Of the last tokens of both sequences, computed in the same three steps: a chunk, another one, one token."""
    config, device = model.config, model.device
    tokens = _check_tokens(config.vocab_size)
    blocks_each = -(-max(CHECK_LENS) // CHECK_BLOCK)
    tables = torch.arange(2 * blocks_each, dtype=torch.int32).view(2, blocks_each)
    pool = torch.full(
        (2 * blocks_each, config.num_layers, 2, config.num_kv_heads, CHECK_BLOCK, config.head_dim), torch.nan
    ).to(device, model.dtype)
    backend = TorchAttention(pool, config.num_heads, config.attention)
    hidden = torch.empty(0)
    ends = np.array([[9, 11], [length - 1 for length in CHECK_LENS], CHECK_LENS])
    for starts, stops in zip(np.vstack(([0, 0], ends[:-1])), ends, strict=True):
        positions = [torch.arange(int(start), int(stop)) for start, stop in zip(starts, stops, strict=True)]
        slots = [
            table[place // CHECK_BLOCK] * CHECK_BLOCK + place % CHECK_BLOCK
            for table, place in zip(tables, positions, strict=True)
        ]
        lens = stops - starts
        metadata = AttentionMetadata(
            slot_mapping=torch.cat(slots).long().to(device),
            seq_lens=torch.tensor(stops, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            query_lens_on_host=lens,
            seq_lens_on_host=stops,
        )
        step_tokens = torch.cat([of[place] for of, place in zip(tokens, positions, strict=True)])
        hidden = model.forward(step_tokens.to(device), torch.cat(positions).to(device), backend.prepare(metadata))
    return list(model.logits(hidden))
