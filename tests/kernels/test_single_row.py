"""Products of a single row, with all that is fused into them, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.worker.kernels.overlap import can_overlap
from octavo.worker.kernels.single_row_product import single_row_product
from octavo.worker.models import linear
from octavo.worker.models.gpu_decoder import FusedAttention, GpuDecoder
from octavo.worker.models.single_row import SingleRow
from octavo.worker.models.weights import load_decoder
from support.tiny_models import save_tiny_model

CANARY = 777.0
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "norm": {"norm": True},
    "norm and bias": {"norm": True, "bias": True},
    "add": {"add": True},
    "add with bias": {"add": True, "bias": True},
    "gate": {"norm": True, "gate": True},
    "gate with bias": {"bias": True, "gate": True},
}


def plain_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    add_to: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """In float32 until the end; `add_to` is left as it is."""
    wide = x.float()
    if norm is not None:
        wide = torch.nn.functional.rms_norm(wide, (x.shape[1],), norm.float(), eps)
    result = torch.nn.functional.linear(wide, weight.float(), None if bias is None else bias.float())
    if is_gated:
        first, second = result.chunk(2, -1)
        result = torch.nn.functional.silu(first) * second
    if add_to is not None:
        result = result + add_to.float()
    return result.to(x.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("in_features", "out_features", "tiling"),
    [(64, 32, (16, 32, 4, 3)), (48, 20, (16, 32, 4, 2)), (7, 3, (4, 16, 1, 2)), (130, 18, (8, 64, 2, 4))],
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_product_equals_the_plain_one(
    device: str, kind: str, in_features: int, out_features: int, tiling: tuple[int, int, int, int], overlaps: bool
) -> None:
    if overlaps and not can_overlap():
        pytest.skip("no programmatic dependent launch here")
    torch.manual_seed(3)
    has = KINDS[kind]
    is_gated = bool(has.get("gate"))
    num_rows = 2 * out_features if is_gated else out_features

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    x, weight = some(1, in_features), some(num_rows, in_features)
    bias = some(num_rows) if has.get("bias") else None
    norm = some(in_features) if has.get("norm") else None
    around = torch.full((out_features + 16,), CANARY, device=device)
    residual = None
    if has.get("add"):
        residual = around[8:-8].view(1, -1)
        residual.copy_(some(1, out_features))
    expected = plain_product(x, weight, bias, norm, 1e-5, add_to=residual, is_gated=is_gated)

    found = single_row_product(
        x, weight, bias, norm, 1e-5, add_to=residual, is_gated=is_gated, overlaps=overlaps, tiling=tiling
    )

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if residual is not None:
        assert found.data_ptr() == residual.data_ptr()
        assert around[:8].eq(CANARY).all()
        assert around[-8:].eq(CANARY).all()


class PlainAttention(FusedAttention):
    """Something that depends on every head and on the layer."""

    def forward(self, layer: int, heads: torch.Tensor, norms: object, *, overlaps: bool = False) -> torch.Tensor:
        query, key, value = heads[:, :6], heads[:, 6:8], heads[:, 8:]
        return (query * (1 + layer) + (key * value).repeat_interleave(3, 1)).reshape(len(heads), -1)


@pytest.mark.parametrize("architecture", ["llama", "linear_rope", "qwen2"])
def test_layers_of_one_row_give_what_the_usual_way_gives(
    architecture: str, device: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: False)  # weights as on a GPU
    folder = save_tiny_model(architecture, tmp_path_factory.mktemp(architecture)).folder
    decoder = load_decoder(folder, torch.float32, torch.device(device))
    model = GpuDecoder(decoder)
    token_ids = torch.tensor([17], device=device)
    usual = model.forward(token_ids, PlainAttention())
    for overlaps in [False, True] if can_overlap() else [False]:
        model.single_row = SingleRow(decoder, overlaps=overlaps)
        torch.testing.assert_close(model.forward(token_ids, PlainAttention()), usual, rtol=1e-4, atol=1e-5)
    two = torch.tensor([17, 5], device=device)
    torch.testing.assert_close(model.forward(two, PlainAttention())[:1], usual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_several_rows_that_overlap_come_out_as_usual(
    architecture: str, device: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_overlap():
        pytest.skip("no programmatic dependent launch here")
    folder = save_tiny_model(architecture, tmp_path_factory.mktemp(architecture)).folder
    model = GpuDecoder(load_decoder(folder, torch.bfloat16, torch.device(device)))
    token_ids = torch.arange(40, dtype=torch.int32, device=device)

    usual = model.forward(token_ids, PlainAttention())
    model.overlaps = True
    for _ in range(20):
        assert torch.equal(model.forward(token_ids, PlainAttention()), usual)


def test_what_the_fused_layers_cannot_do_is_left_to_the_usual_way(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: False)
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama")).folder
    decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
    assert not SingleRow.serves(decoder), "float32"
    half = load_decoder(folder, torch.bfloat16, torch.device("cpu"))
    assert SingleRow.serves(half)
    half.layers[1] = replace(half.layers[1], down_norm=half.norm)
    assert not SingleRow.serves(half)
