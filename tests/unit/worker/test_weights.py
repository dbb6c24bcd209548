"""What is read from a model folder, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.worker.models.config import read_model_config
from octavo.worker.models.errors import (
    MissingTensorError,
    ModelLoadError,
    TensorShapeError,
    UnexpectedTensorError,
    UnknownArchitectureError,
)
from octavo.worker.models.linear import PlainLinear
from octavo.worker.models.tensor_files import TensorReader, open_tensor_files
from octavo.worker.models.weights import Checkpoint, build_decoder, expected_tensors, load_decoder
from support.runner_driver import RunnerDriver, make_runner
from support.tiny_models import TinyModel, prompt_of

MakeTiny = Callable[[str], TinyModel]


@pytest.fixture
def folder(tiny: MakeTiny, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    shutil.copytree(tiny("llama").folder, tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path) -> None:
    load_decoder(folder, torch.float32, torch.device("cpu"))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(MissingTensorError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_unexpected_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)})
    with pytest.raises(UnexpectedTensorError, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_tensor_of_another_shape_is_named(folder: Path) -> None:
    change_tensors(folder, **{"model.norm.weight": torch.zeros(47)})
    with pytest.raises(TensorShapeError, match=r"model\.norm\.weight is \[47\] in the checkpoint, \[48\]"):
        load(folder)


def test_saved_output_layer_and_old_rotary_tables_are_ignored_when_tied(folder: Path) -> None:
    change_tensors(
        folder,
        **{"lm_head.weight": torch.zeros(160, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    )
    load(folder)


def test_checkpoint_decides_whether_embeddings_are_tied_if_the_config_is_silent(tiny: MakeTiny, tmp_path: Path) -> None:
    for name in ("llama", "qwen2"):
        folder = tmp_path / name
        shutil.copytree(tiny(name).folder, folder)
        config = json.loads((folder / "config.json").read_text())
        del config["tie_word_embeddings"]
        (folder / "config.json").write_text(json.dumps(config))
        driver = RunnerDriver(make_runner(folder))
        generation = driver.open(prompt_of(9), 5)
        driver.generate([generation], 5)
        assert generation.output == tiny(name).greedy(prompt_of(9), 5)


def test_sharded_checkpoint_is_read_by_its_index(tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("qwen3")
    model.reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    driver = RunnerDriver(make_runner(tmp_path))
    generation = driver.open(prompt_of(9), 5)
    driver.generate([generation], 5)
    assert generation.output == model.greedy(prompt_of(9), 5)


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "/etc/passwd",
        "sub/a.safetensors",
        "pytorch_model.bin",
        "..",
        "",
        7,
        None,
        "a\0.safetensors",
    ],
)
def test_index_that_names_no_safetensors_file_of_the_folder_is_refused(folder: Path, name: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelLoadError, match="no safetensors files beside it"):
        load(folder)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": ["b"]}}', "[" * 9])
def test_index_of_another_form_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json cannot be read"):
        load(folder)


def test_tensors_larger_than_the_staging_buffer_are_read_in_pieces(folder: Path) -> None:
    name, device = "model.layers.0.mlp.up_proj.weight", torch.device("cpu")
    expected = load_file(folder / "model.safetensors")[name]
    with open_tensor_files(folder) as stored:
        for dtype in (torch.float32, torch.bfloat16):
            target = torch.full(expected.shape, torch.nan, dtype=dtype)
            TensorReader(device, staging_bytes=1000).read(stored[name], target)
            assert torch.equal(target, expected.to(dtype))


def test_file_that_became_shorter_is_named(folder: Path) -> None:
    with open_tensor_files(folder) as stored:
        os.truncate(folder / "model.safetensors", 5000)
        last = max(stored.values(), key=lambda one: one.offset)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors became shorter"):
            TensorReader(torch.device("cpu")).read(last, torch.empty(last.shape))


def test_threads_load_what_one_loads(folder: Path) -> None:
    """As on a GPU, layers are built by several threads at once; the progress still only rises."""
    device, config = torch.device("cpu"), read_model_config(folder)
    loaded = []
    for num_readers in (1, 4):
        shares: list[float] = []
        with open_tensor_files(folder) as stored:
            checkpoint = Checkpoint(stored, torch.bfloat16, device, shares.append)
            checkpoint.num_readers = num_readers
            checkpoint.compare(expected_tensors(config), set())
            loaded.append(build_decoder(config, checkpoint))
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
    for one, other in zip(loaded[0].layers, loaded[1].layers, strict=True):
        assert isinstance(one.qkv, PlainLinear)
        assert isinstance(other.qkv, PlainLinear)
        assert torch.equal(one.qkv.weight, other.qkv.weight)
        assert torch.equal(one.mlp_norm, other.mlp_norm)


def test_progress_reaches_one(folder: Path) -> None:
    shares: list[float] = []
    load_decoder(folder, torch.float32, torch.device("cpu"), shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"has no \*\.safetensors file"):
        load(folder)


def test_damaged_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load(folder)


def test_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is this a model folder"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not one of"),
        ({"architectures": None, "model_type": "mamba"}, "of model_type 'mamba' is not one of"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not silu"),
        ({"num_key_value_heads": 4}, "6 query heads cannot share 4 KV heads"),
        ({"head_dim": 7}, "needs an even head_dim"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not 1"),
    ],
)
def test_setting_that_no_decoder_computes_is_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(UnknownArchitectureError, match=message):
        read_model_config(folder)


def test_config_without_a_needed_setting_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="hidden_size"):
        read_model_config(folder)


def test_older_spelling_of_rope_settings(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    rope = read_model_config(folder).ropes[0]
    assert rope is not None
    assert (rope.theta, rope.kind, rope.factor) == (500000.0, "linear", 2.0)


def test_end_of_sequence_ids_of_both_files_are_joined(folder: Path) -> None:
    change_config(folder, eos_token_id=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_model_config(folder).eos_token_ids == (7, 2)
