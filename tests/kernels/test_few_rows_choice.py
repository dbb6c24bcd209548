"""Which steps the kernels for few rows on Hopper take, and that those compile. tests/gpu tests what they compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from octavo.worker.kernels.rms_norm import rms_norm
from octavo.worker.models import launch_ways, linear
from octavo.worker.models.decoder import Decoder
from octavo.worker.models.gpu_decoder import FusedAttention, GpuDecoder
from octavo.worker.models.linear import PlainLinear
from octavo.worker.models.weights import load_decoder
from support.compile_for_hopper import compile_for_hopper
from support.tiny_models import save_tiny_model

few_rows = pytest.importorskip("octavo.worker.models.few_rows")
products = pytest.importorskip("octavo.worker.kernels.few_row_products")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama")).folder


@pytest.fixture(autouse=True)
def _weights_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: False)


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 16), (16, 16), (17, 32), (33, 64), (64, 64), (65, 128)])
def test_rows_are_padded_to_a_size(num_rows: int, padded: int) -> None:
    assert products.pad_rows(num_rows) == padded


@pytest.mark.parametrize(
    ("num_tiles", "in_features", "splits"),
    [
        (48, 4096, 2),
        (32, 4096, 4),
        (32, 14336, 4),
        (40, 5120, 3),
        (67, 4096, 1),
        (200, 4096, 1),
        (1, 300, 3),
        (1, 9999, 8),
    ],
)
def test_tiles_are_split_so_that_programs_are_busy(num_tiles: int, in_features: int, splits: int) -> None:
    assert products.count_splits(num_tiles, in_features, 132) == splits


@pytest.mark.parametrize(("kind", "rows"), [("adds", 64), ("gated", 64), ("plain", 16)])
def test_they_compile_to_what_hopper_has(kind: str, rows: int) -> None:
    shared_bytes, ptx = compile_for_hopper("product", str(rows), kind)

    assert shared_bytes <= 227 * 2**10
    assert ptx.count(f"wgmma.mma_async.sync.aligned.m64n{rows}k16") == 2 * 8  # two groups, two times a depth of 64
    copying = ptx[ptx.index("cp.async.bulk.tensor.2d") :]
    weights, _, rest = copying.partition("griddepcontrol.wait")
    assert weights.count("cp.async.bulk.tensor.2d") == 4, "of the weight alone before earlier kernels have ended"
    assert rest.count("cp.async.bulk.tensor.2d") == 4 + 2 * (1 if kind == "gated" else 2)


def test_what_they_serve(folder: Path) -> None:
    def load(dtype: torch.dtype) -> Decoder:
        return load_decoder(folder, dtype, torch.device("cpu"))

    assert not few_rows.FewRows.serves(load(torch.float16))
    decoder = load(torch.bfloat16)
    assert few_rows.FewRows.serves(decoder)
    layer = decoder.layers[1]
    with_bias = PlainLinear(layer.qkv.weight, torch.zeros(len(layer.qkv.weight)))
    decoder.layers[1] = replace(layer, qkv=with_bias)
    assert few_rows.FewRows.serves(decoder)
    decoder.layers[1] = replace(layer, down=PlainLinear(layer.down.weight, torch.zeros(len(layer.down.weight))))
    assert not few_rows.FewRows.serves(decoder), "a bias of what adds to the residual"
    decoder.layers[1] = replace(layer, output=PlainLinear(layer.output.weight[:, :-4], None))
    assert not few_rows.FewRows.serves(decoder), "lines of 8 bytes less than the copy engine takes"


class PlainAttention(FusedAttention):
    """Something that depends on every head and on the layer."""

    def forward(self, layer: int, heads: Tensor, norms: object, *, overlaps: bool = False) -> Tensor:
        query, key, value = heads[:, :6], heads[:, 6:8], heads[:, 8:]
        return (query * (1 + layer) + (key * value).repeat_interleave(3, 1)).reshape(len(heads), -1)


@pytest.mark.parametrize(("is_right", "expected"), [(True, {16, 64}), (False, set())])
def test_the_clock_chooses_the_sizes_if_they_come_out_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool, expected: set[int]
) -> None:
    model = GpuDecoder(load_decoder(folder, torch.bfloat16, torch.device("cpu")))
    embed = model.decoder.embed
    usual = GpuDecoder.forward

    def forward(self: GpuDecoder, token_ids: Tensor, attention: FusedAttention) -> Tensor:
        return embed(token_ids) if self.few_rows is None else usual(self, token_ids, attention)

    def by_hopper(self: object, token_ids: Tensor, attention: FusedAttention) -> Tensor:
        return embed(token_ids) if is_right else embed(token_ids).flip(0)

    clock = iter([4.0, 3.8, 4.0, 3.99, 4.3, 4.2] if is_right else [4.0, 4.0, 4.0])
    monkeypatch.setattr(launch_ways, "graph_ms", lambda launch: next(clock))
    monkeypatch.setattr(launch_ways, "hopper_kernels", lambda name: ModuleType(name))
    monkeypatch.setattr(few_rows, "Scratch", lambda *sizes: None)
    monkeypatch.setattr(few_rows.FewRows, "forward", by_hopper)
    monkeypatch.setattr(GpuDecoder, "forward", forward)

    times = launch_ways.choose_few_rows(model)

    assert times[16] == ({"usual": 4.0, "few_rows": 3.8} if is_right else {"usual": 4.0})
    assert list(times) == [16, 32, 64]
    assert {size for size in (16, 32, 64, 128) if model.few_rows and model.few_rows.runs(size)} == expected
    if model.few_rows:
        monkeypatch.setattr(few_rows.FewRows, "forward", lambda self, token_ids, attention: "by Hopper")
        assert model.forward(torch.zeros(40, dtype=torch.int32), None) == "by Hopper"  # type: ignore[arg-type]


def add_product(
    residual: Tensor, x: Tensor, weight: Tensor, norm: Tensor, scratch: list[Tensor], **_: object
) -> Tensor:
    """As the kernels' rules say, in plain torch; `scratch` gets the rows' mean squares."""
    residual.copy_(residual.float() + x.float() @ weight.float().t())
    scratch[:] = [residual.float().square().mean(1, keepdim=True)]
    return residual * norm


def normed_product(
    normed: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scratch: list[Tensor], **_: object
) -> Tensor:
    result = normed.float() @ weight.float().t() / (scratch[0] + eps).sqrt()
    return (result if bias is None else result + bias.float()).to(normed.dtype)


def gated_product(normed: Tensor, weight: Tensor, eps: float, scratch: list[Tensor], **_: object) -> Tensor:
    gate, up = normed_product(normed.float(), weight, None, eps, scratch).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(normed.dtype)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_layers_are_put_together_as_the_usual_way_does(
    architecture: str, device: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "Scratch", lambda *sizes: [])
    for product in (add_product, normed_product, gated_product):
        monkeypatch.setattr(few_rows, product.__name__, product)
    monkeypatch.setattr(few_rows, "rms_norm", lambda x, weight, eps, overlaps: rms_norm(x, weight, eps))
    folder = save_tiny_model(architecture, tmp_path_factory.mktemp(architecture)).folder
    model = GpuDecoder(load_decoder(folder, torch.float32, torch.device(device)))
    token_ids = torch.tensor([17, 5, 9], device=device)
    expected = model.forward(token_ids, PlainAttention())
    model.few_rows = few_rows.FewRows(model.decoder)

    found = model.forward(token_ids, PlainAttention())

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, expected), "which is how one sees that it was run in the other way"
    assert torch.equal(
        model.forward(token_ids, PlainAttention(), torch.tensor([2, 0, 2], device=device)), found[[2, 0, 2]]
    )


def test_without_a_hopper_nothing_is_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ways, "hopper_kernels", lambda name: None)
    model = GpuDecoder(load_decoder(folder, torch.bfloat16, torch.device("cpu")))
    assert launch_ways.choose_few_rows(model) == {}
    assert model.few_rows is None
