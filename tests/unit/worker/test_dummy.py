from __future__ import annotations

import json
from pathlib import Path

import torch

from octavo.worker.models.dummy import make_dummy_decoder
from support.tiny_models import SHAPE

CPU = torch.device("cpu")


def test_a_config_alone_makes_a_model_of_its_shape_and_always_the_same(tmp_path: Path) -> None:
    config = {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shares: list[float] = []

    first = make_dummy_decoder(tmp_path, torch.float32, CPU, shares.append)
    second = make_dummy_decoder(tmp_path, torch.float32, CPU)

    assert first.embedding.shape == (SHAPE["vocab_size"], SHAPE["hidden_size"])
    assert len(first.layers) == SHAPE["num_hidden_layers"]
    assert torch.equal(first.embedding, second.embedding)
    assert shares[-1] == 1.0
