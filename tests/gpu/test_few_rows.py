"""Products of few rows by the kernels for Hopper over a grid of shapes, and decoders that run by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.pairwise import case_name, pairwise_cases
from support.tiny_models import save_tiny_model

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from octavo.worker.kernels.few_row_products import Scratch, add_product, gated_product, normed_product
from octavo.worker.models.few_rows import FewRows
from octavo.worker.models.gpu_decoder import FusedAttention, GpuDecoder
from octavo.worker.models.weights import load_decoder

pytestmark = pytest.mark.gpu

EPS = 1e-5
CANARY = 777.0
TOLERANCE = 4e-3
"""Of the norm: bfloat16 rounds what is stored, twice."""
AXES: dict[str, list[object]] = {
    "num_rows": [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64],
    "attended_size": [8, 136, 4096],
    "hidden_size": [48, 72, 1000, 4096, 5120],
    "gated_size": [8, 200, 1000, 14336, 17000],
    "heads_size": [56, 96, 6144, 20000],
    "has_bias": [False, True],
    "overlaps": [False, True],
}


class Layer:
    """Two sums with a residual, and what follows on each."""

    def __init__(self, case: dict[str, object], seed: int = 0) -> None:
        torch.manual_seed(seed)
        sizes = {name: int(case[f"{name}_size"]) for name in ("attended", "hidden", "gated", "heads")}  # type: ignore[call-overload]
        hidden, gated = sizes["hidden"], sizes["gated"]
        self.output = weight(hidden, sizes["attended"])
        self.gate_up = weight(2 * gated, hidden)
        self.down = weight(hidden, gated)
        self.qkv = weight(sizes["heads"], hidden)
        self.bias = some(sizes["heads"]) if case["has_bias"] else None
        self.norms = [1 + 0.2 * some(hidden) for _ in range(2)]
        self.residual = some(int(case["num_rows"]), hidden)  # type: ignore[call-overload]
        self.attended = some(len(self.residual), sizes["attended"])
        self.overlaps = bool(case["overlaps"])
        self.scratch = Scratch(max(hidden, sizes["heads"]), hidden, torch.device("cuda"))

    def run(self, residual: Tensor) -> Tensor:
        """Returns heads; `residual` is overwritten."""
        given = self.scratch, self.overlaps
        normed = add_product(residual, self.attended, self.output, self.norms[0], given[0], overlaps=given[1])
        gated = gated_product(normed, self.gate_up, EPS, given[0], overlaps=given[1])
        normed = add_product(residual, gated, self.down, self.norms[1], given[0], overlaps=given[1])
        return normed_product(normed, self.qkv, self.bias, EPS, given[0], overlaps=given[1])

    def run_plainly(self) -> tuple[Tensor, Tensor]:
        """Residual and heads, float32."""
        residual = (self.residual.float() + self.attended.float() @ self.output.float().t()).bfloat16().float()
        gate, up = (self._norm(residual, 0) @ self.gate_up.float().t()).chunk(2, -1)
        gated = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        residual = (residual + gated @ self.down.float().t()).bfloat16().float()
        heads = self._norm(residual, 1) @ self.qkv.float().t()
        return residual, heads if self.bias is None else heads + self.bias.float()

    def _norm(self, residual: Tensor, index: int) -> Tensor:
        return torch.nn.functional.rms_norm(residual, residual.shape[1:], self.norms[index].float(), EPS)


def some(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def weight(out_features: int, in_features: int) -> Tensor:
    return some(out_features, in_features) * in_features**-0.5


def poison(layer: Layer) -> None:
    """What the next tensors of these sizes are made of is NaN."""
    for one in (layer.residual, layer.qkv, layer.down):
        torch.full((64, max(one.shape)), torch.nan, device="cuda", dtype=torch.bfloat16)


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("case", pairwise_cases(AXES, limit=28), ids=case_name)
def test_products_equal_the_plain_ones(case: dict[str, object]) -> None:
    layer = Layer(case)
    residual, heads = layer.run_plainly()
    around = torch.full((len(residual) + 2, residual.shape[1]), CANARY, device="cuda", dtype=torch.bfloat16)
    around[1:-1] = layer.residual
    poison(layer)

    found = layer.run(around[1:-1])

    assert error(around[1:-1], residual) < TOLERANCE
    assert error(found, heads) < 2 * TOLERANCE
    assert around[0].eq(CANARY).all()
    assert around[-1].eq(CANARY).all()
    assert layer.scratch.arrivals.eq(0).all()


def test_rows_may_lie_apart() -> None:
    case = {"attended_size": 136, "hidden_size": 72, "gated_size": 200, "heads_size": 96, "has_bias": False}
    layer = Layer({**case, "num_rows": 21, "overlaps": True})
    apart = torch.full((21, 200), torch.nan, device="cuda", dtype=torch.bfloat16)
    apart[:, 8:144] = layer.attended
    layer.attended = apart[:, 8:144]
    expected, heads = layer.run_plainly()
    residual = layer.residual.clone()

    assert error(layer.run(residual), heads) < 2 * TOLERANCE
    assert error(residual, expected) < TOLERANCE


LLAMA_8B = {"attended_size": 4096, "hidden_size": 4096, "gated_size": 14336, "heads_size": 6144, "has_bias": False}


@pytest.mark.parametrize("num_rows", [5, 64])
def test_layers_in_a_graph_come_out_the_same_each_time(num_rows: int) -> None:
    layer = Layer({**LLAMA_8B, "num_rows": num_rows, "overlaps": True})
    residual, heads = layer.residual.clone(), layer.run(layer.residual.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [layer.run(residual) for _ in range(8)]
    finals = []
    for _ in range(50):
        residual.copy_(layer.residual)
        graph.replay()
        assert torch.equal(found[0], heads)
        finals.append(found[-1].clone())

    assert all(torch.equal(final, finals[0]) for final in finals)
    assert finals[0].isfinite().all()


class PlainAttention(FusedAttention):
    """Something that depends on every head and on the layer."""

    def forward(self, layer: int, heads: Tensor, norms: object, *, overlaps: bool = False) -> Tensor:
        query, key, value = heads[:, :6], heads[:, 6:8], heads[:, 8:]
        return (query * (1 + layer) + (key * value).repeat_interleave(3, 1)).reshape(len(heads), -1)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_decoders_give_what_the_usual_way_gives(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = save_tiny_model(architecture, tmp_path_factory.mktemp(architecture)).folder
    exact = GpuDecoder(load_decoder(folder, torch.float32, torch.device("cuda")))
    model = GpuDecoder(load_decoder(folder, torch.bfloat16, torch.device("cuda")))
    assert FewRows.serves(model.decoder)
    for num_rows in (1, 2, 16, 23, 64, 65):
        token_ids = torch.arange(1, num_rows + 1, dtype=torch.int32, device="cuda")  # 0 is padding, all zeros
        expected = exact.forward(token_ids, PlainAttention())
        model.few_rows = None
        usual = error(model.forward(token_ids, PlainAttention()), expected)
        model.few_rows = FewRows(model.decoder)

        assert error(model.forward(token_ids, PlainAttention()), expected) < max(1.5 * usual, 0.01)
