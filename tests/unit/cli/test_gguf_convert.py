"""A GGUF file becomes the Hugging Face folder that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from octavo.cli.gguf_convert import convert_gguf, halves_apart
from octavo.cli.model_errors import UnsupportedModelError
from support.silence import silent
from support.tiny_gguf import TinyGguf


def convert(gguf: TinyGguf, tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(gguf.write(tmp_path / "tiny.gguf"), folder, silent)
    return folder


def test_rows_of_a_head_are_put_back_half_by_half() -> None:
    stored = np.arange(8, dtype=np.float32)[:, None]  # two heads of four rows, stored a0 b0 a1 b1
    assert halves_apart(stored, num_heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_every_tensor_gets_its_hugging_face_name_and_order(tmp_path: Path) -> None:
    gguf = TinyGguf()
    tensors = load_file(convert(gguf, tmp_path) / "model.safetensors")

    assert len(tensors) == len(gguf.weights) == 20
    for name, tensor in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    }.items():
        np.testing.assert_array_equal(tensors[name], gguf.weights[tensor], err_msg=name)


def test_qwen2_rows_stay_as_they_are(tmp_path: Path) -> None:
    gguf = TinyGguf(architecture="qwen2", pre_tokenizer="qwen2")
    folder = convert(gguf, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    np.testing.assert_array_equal(
        tensors["model.layers.0.self_attn.q_proj.weight"], gguf.weights["blk.0.attn_q.weight"]
    )
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_the_config_has_the_files_numbers(tmp_path: Path) -> None:
    config = json.loads((convert(TinyGguf(), tmp_path) / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "head_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "vocab_size": 263,
        "max_position_embeddings": 64,
        "rope_theta": 1234.0,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    assert {name: config[name] for name in expected} == expected


def test_an_output_layer_of_its_own_unties_the_embeddings(tmp_path: Path) -> None:
    folder = convert(TinyGguf(tied=False), tmp_path)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(folder / "model.safetensors")


@pytest.mark.parametrize("text", ["hello hello", "naïve Ω 東京 🐙", "  two  spaces\n\ttab\r\n", "12345 it's", ""])
def test_the_tokenizer_gives_back_what_it_was_given(tmp_path: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(convert(TinyGguf(), tmp_path) / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_merges_apply_and_control_tokens_stay_whole(tmp_path: Path) -> None:
    folder = convert(TinyGguf(), tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("hello hello<|end|>").tokens == ["hello", "Ġhello", "<|end|>"]
    assert tokenizer.decode([0, 261], skip_special_tokens=True) == "hello"

    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|start|>", "<|end|>")
    assert config["chat_template"] == "{{ messages[0]['content'] }}"


def test_a_start_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(convert(TinyGguf(add_bos=True), tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("hello").tokens == ["<|start|>", "hello"]
    assert tokenizer.encode("hello", add_special_tokens=False).tokens == ["hello"]


@pytest.mark.parametrize(
    ("gguf", "complaint"),
    [
        (TinyGguf(architecture="mamba"), "architecture is 'mamba'"),
        (TinyGguf(pre_tokenizer="exotic"), "pre-tokenizer is 'exotic'"),
        (TinyGguf(left_out=("blk.1.ffn_up.weight",)), "lacks 1 tensors, model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, gguf: TinyGguf, complaint: str) -> None:
    with pytest.raises(UnsupportedModelError, match=complaint):
        convert(gguf, tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF" + bytes(12)])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"broken\.gguf"):
        convert_gguf(path, tmp_path, silent)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = TinyGguf().write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf"):
        convert_gguf(path, tmp_path, silent)
