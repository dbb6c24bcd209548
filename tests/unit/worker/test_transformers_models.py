"""Models that our decoder does not compute: transformers' layers around our attention, or a refusal that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.worker.models.errors import MissingTensorError, ModelLoadError, UnknownArchitectureError
from octavo.worker.models.model_folder import open_model
from octavo.worker.models.transformers_loading import TransformersFolder
from support.runner_driver import RunnerDriver, make_runner
from support.tiny_models import OF_TRANSFORMERS, SHAPE, TinyModel, prompt_of

PROMPT_LENGTHS = [1, 15, 16, 17, 33, 100]
NUM_NEW = 12
CPU = torch.device("cpu")

MakeTiny = Callable[[str], TinyModel]


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_mixed_batch_equals_transformers(tiny: MakeTiny, name: str) -> None:
    model = tiny(name)
    driver = RunnerDriver(make_runner(model.folder))
    generations = [driver.open(prompt_of(length), NUM_NEW) for length in PROMPT_LENGTHS]
    driver.generate(generations, NUM_NEW, chunk=16)

    for generation in generations:
        prompt = generation.prompt
        expected = model.logits(prompt + generation.output)[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.stack(generation.logits), expected, atol=1e-4, rtol=0)
        assert generation.output == expected.argmax(-1).tolist(), f"prompt of {len(prompt)}"


def save(folder: Path, config: Any) -> Path:
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    return folder


def load(folder: Path) -> None:
    open_model(folder, 256).load(torch.float32, CPU)


SMALL = {**SHAPE, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            transformers.BloomConfig(vocab_size=160, hidden_size=48, n_layer=2, n_head=6),
            "does not say how many positions it has",
        ),
        (
            transformers.FalconConfig(vocab_size=160, hidden_size=48, num_hidden_layers=2, num_attention_heads=6),
            "has 2 layers, of which 0 use transformers' attention interface",
        ),
        (
            transformers.FalconConfig(
                vocab_size=160, hidden_size=48, num_hidden_layers=2, num_attention_heads=12, alibi=True
            ),
            "has 2 layers, of which 0 use transformers' attention interface",
        ),
        (
            transformers.MptConfig(vocab_size=160, d_model=48, n_layers=2, n_heads=6),
            "does not say how many positions it has",
        ),
        (
            transformers.MambaConfig(vocab_size=160, hidden_size=48, num_hidden_layers=2, state_size=4),
            "does not say how many positions it has",
        ),
        (
            transformers.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1),
            "settings that no kernel here has: s_aux",
        ),
        (
            transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"]),
            "layer_types has conv",
        ),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else "",
)
def test_what_our_attention_cannot_serve_is_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(UnknownArchitectureError, match=message):
        load(save(tmp_path, config))


def test_a_state_beside_keys_and_values_is_found_by_comparing(tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each embedding is mixed with that of the token before, which a step does not know of its first token."""
    original = transformers.Olmo2Model.forward

    def shifted(self: Any, input_ids: torch.Tensor, **others: Any) -> Any:
        mixed = self.embed_tokens(input_ids) + self.embed_tokens(input_ids.roll(1, -1))
        return original(self, **{**others, "inputs_embeds": mixed})

    monkeypatch.setattr(transformers.Olmo2Model, "forward", shifted)
    with pytest.raises(UnknownArchitectureError, match="gives other logits in steps than as a whole"):
        load(tiny("olmo2").folder)


def test_missing_weights_are_not_made_up(tiny: MakeTiny, tmp_path: Path) -> None:
    source = tiny("stablelm").folder
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MissingTensorError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_pickled_weights_are_not_opened(tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("stablelm")
    (tmp_path / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    torch.save(model.reference.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="other formats must be converted first"):
        load(tmp_path)


def test_index_that_leads_out_of_the_folder_is_not_followed(tiny: MakeTiny, tmp_path: Path) -> None:
    model = tiny("stablelm")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    (tmp_path / "other.safetensors").write_bytes((model.folder / "model.safetensors").read_bytes())
    names = load_file(model.folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="no safetensors files beside it"):
        load(folder)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    config = {
        "model_type": "mine",
        "architectures": ["Mine"],
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownArchitectureError, match=r"Mine is not one of .*; by transformers: "):
        load(tmp_path)
    assert not ran.exists()


def test_longrope_is_served_up_to_its_trained_length(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    config = transformers.Phi3Config(
        **{**SMALL, "max_position_embeddings": 1024},
        original_max_position_embeddings=256,
        rope_parameters={**rope, "partial_rotary_factor": 0.5},
    )
    config.save_pretrained(tmp_path)
    TransformersFolder(tmp_path, 256)
    with pytest.raises(UnknownArchitectureError, match="set max_model_len=256"):
        TransformersFolder(tmp_path, 257)


def test_random_weights_by_the_configuration_alone(tiny: MakeTiny, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny("granite").folder / "config.json").read_bytes())
    model = open_model(tmp_path, None).load(torch.float32, CPU, is_dummy=True)
    assert (model.config.num_layers, model.config.num_kv_heads, model.config.head_dim) == (3, 2, 8)
    assert model.config.attention[0].scale == pytest.approx(0.2)
