"""Products of e4m3 on a real GPU against the plain ones of the same rounded numbers."""

from __future__ import annotations

import pytest
import torch

from octavo.worker.models.fp8_linear import DequantizedLinear, make_fp8_linear, to_rows_of_e4m3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def assert_rows_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 2 % of the largest number of the row: rows are of very different sizes."""
    error = (actual.float() - expected).abs().amax(dim=1)
    assert (error <= 2e-2 * expected.abs().amax(dim=1)).all(), error / expected.abs().amax(dim=1)


@pytest.mark.parametrize("num_rows", [1, 3, 64, 513])
@pytest.mark.parametrize(
    ("out_features", "in_features", "has_bias"), [(6144, 4096, False), (80, 48, True), (4096, 14336, False)]
)
def test_a_scaled_product_equals_the_plain_one(
    num_rows: int, out_features: int, in_features: int, has_bias: bool
) -> None:
    from octavo.worker.models.scaled_linear import ScaledLinear

    torch.manual_seed(0)
    x = torch.randn((num_rows, in_features), dtype=torch.bfloat16, device="cuda")
    x[-1] *= 300
    residual = torch.randn((num_rows, out_features), dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(out_features, dtype=torch.bfloat16, device="cuda") if has_bias else None
    stored, scales = to_rows_of_e4m3(torch.randn((out_features, in_features), device="cuda"))
    layer = make_fp8_linear(stored, scales, bias, torch.bfloat16)
    assert isinstance(layer, ScaledLinear)
    plain = DequantizedLinear(stored, scales, None if bias is None else bias.float(), torch.float32)

    expected = plain(x.float())
    assert_rows_close(layer(x), expected)
    assert_rows_close(layer.add_to(residual.clone(), x), expected + residual)


def test_a_scaled_product_can_be_captured() -> None:
    x = torch.randn((4, 256), dtype=torch.bfloat16, device="cuda")
    layer = make_fp8_linear(*to_rows_of_e4m3(torch.randn((128, 256), device="cuda")), None, torch.bfloat16)
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    graph.replay()
    torch.cuda.synchronize()

    assert torch.equal(out, expected)
