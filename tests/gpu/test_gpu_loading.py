"""Checkpoints reach a GPU whole: through pinned buffers smaller than a tensor, by several threads, with conversion."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo.worker.models.linear import PlainLinear
from octavo.worker.models.tensor_files import StoredTensor, TensorReader, open_tensor_files
from octavo.worker.models.weights import load_decoder
from support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_many_threads_arrive_in_their_places(tmp_path: Path, dtype: torch.dtype) -> None:
    save_tiny_model("llama", tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    reader = TensorReader(CUDA, staging_bytes=1000)

    def read(stored: StoredTensor) -> torch.Tensor:
        target = torch.full(stored.shape, torch.nan, dtype=dtype, device=CUDA)
        reader.read(stored, target)
        return target

    with open_tensor_files(tmp_path) as stored, ThreadPoolExecutor(8) as pool:
        found = dict(zip(stored, pool.map(read, stored.values()), strict=True))
        torch.cuda.synchronize()

    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor.cpu(), expected[name].to(dtype)) for name, tensor in found.items())


def test_a_model_in_shards_is_the_same_on_both_devices(tmp_path: Path) -> None:
    save_tiny_model("gemma3", tmp_path / "whole").reference.save_pretrained(tmp_path / "cut", max_shard_size="40KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1

    on_gpu = load_decoder(tmp_path / "cut", torch.bfloat16, CUDA)
    on_cpu = load_decoder(tmp_path / "whole", torch.bfloat16, torch.device("cpu"))

    assert torch.equal(on_gpu.embedding.cpu(), on_cpu.embedding)
    for one, other in zip(on_gpu.layers, on_cpu.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            found, expected = getattr(one, name), getattr(other, name)
            assert isinstance(found, PlainLinear)
            assert isinstance(expected, PlainLinear)
            assert torch.equal(found.weight.cpu(), expected.weight)
        assert torch.equal(one.input_norm.cpu(), other.input_norm)
