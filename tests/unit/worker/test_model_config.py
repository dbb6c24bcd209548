"""Settings of the families as published checkpoints spell them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from octavo.worker.models.config import DecoderConfig, read_model_config
from octavo.worker.models.errors import ModelLoadError, UnknownArchitectureError

SHAPE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def read(folder: Path, max_model_len: int | None = None, **settings: Any) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps({**SHAPE, **settings}))
    return read_model_config(folder, max_model_len)


def windows(config: DecoderConfig) -> list[int | None]:
    return [layer.window for layer in config.attention]


def test_gemma_2_has_its_own_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["Gemma2ForCausalLM"], sliding_window=1024)
    assert windows(config) == [1024, None, 1024, None, 1024, None]
    assert {(layer.scale, layer.soft_cap) for layer in config.attention} == {(1 / 16, 50.0)}
    assert (config.head_dim, config.logit_cap, config.activation) == (256, 30.0, "gelu_pytorch_tanh")


def test_gemma_3_in_its_older_spelling(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        model_type="gemma3_text",
        sliding_window=512,
        rope_local_base_freq=10_000,
        rope_theta=1_000_000,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert windows(config) == [512] * 5 + [None]
    found = [(rope.theta, rope.kind, rope.factor) for rope in config.ropes if rope is not None]
    assert found == [(10_000.0, "default", 1.0)] * 5 + [(1_000_000.0, "linear", 8.0)]
    assert {layer.soft_cap for layer in config.attention} == {0.0}


def test_phi_3_chooses_its_wave_factors_by_the_longest_sequence(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "model_type": "phi3",
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    }
    for max_model_len, factor in ((1024, 1.0), (1025, 2.0), (None, 2.0)):
        rope = read(tmp_path, max_model_len, **settings).ropes[0]
        assert rope is not None
        assert rope.wave_factors == (factor,) * 4
        assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))


def test_a_window_that_holds_every_sequence_is_none(tmp_path: Path) -> None:
    settings = {"model_type": "mistral", "sliding_window": 2048}
    assert windows(read(tmp_path, **settings)) == [2048] * 6
    assert windows(read(tmp_path, 2048, **settings)) == [None] * 6


def test_stretched_context_of_yarn(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(tmp_path, model_type="qwen2", rope_scaling=rope).max_position_embeddings == 16_384


def test_layers_that_do_not_look_at_positions(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="smollm3")
    assert [rope is None for rope in config.ropes] == [False, False, False, True, False, False]
    assert config.ropes[0] is not None
    assert config.ropes[0].theta == 2_000_000.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_type": "llama", "num_attention_heads": 33, "num_key_value_heads": 2, "head_dim": 8},
            "33 query heads cannot share 2 KV heads evenly",
        ),
        ({"model_type": "llama", "head_dim": 25}, "needs an even head_dim, this one is 25"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "activation 'gelu' is not gelu_pytorch_tanh"),
        ({"model_type": "gemma2", "sliding_window": 0}, "sliding_window 0 is not positive"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 6}, "layer_types has chunked_attention"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types has 1 entries for 6 layers"),
    ],
)
def test_setting_that_no_decoder_computes_is_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownArchitectureError, match=message):
        read(tmp_path, **settings)


def test_wave_factors_that_are_absent_or_too_few_are_refused(tmp_path: Path) -> None:
    for factors in ({}, {"short_factor": [1.0] * 3}):
        with pytest.raises(ModelLoadError, match="short_factor"):
            read(tmp_path, model_type="phi3", rope_scaling={"type": "longrope", **factors})
