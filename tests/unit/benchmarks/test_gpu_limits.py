"""What benchmarks/gpu_limits.py says is the least time of a workload."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
COPY, MATMUL = 4.3e12, 790e12


@pytest.fixture
def gpu_limits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu_limits")


def bound(gpu_limits: ModuleType, workload: object) -> Any:
    return gpu_limits.bound_of(workload, gpu_limits.Limits(COPY, MATMUL))


def test_one_row_is_bound_by_reading_its_15_gb_of_weights(gpu_limits: ModuleType) -> None:
    workload = [([1] * 10, 128)]

    assert bound(gpu_limits, workload).tpot_ms == pytest.approx(15.01 / 4.3, rel=0.005)


def test_many_rows_are_bound_by_their_products(gpu_limits: ModuleType) -> None:
    workload = [([row], 2) for row in range(4_000)]

    products_ms = 1e3 * 4_000 * 2 * 7.505e9 / MATMUL
    assert bound(gpu_limits, workload).tpot_ms == pytest.approx(products_ms, rel=0.005)


def test_what_all_prompts_begin_with_is_computed_and_read_once(gpu_limits: ModuleType) -> None:
    shared = [([7] * 1_500 + [row], 2) for row in range(500)]
    alike = [([row] + [7] * 1_500, 2) for row in range(500)]

    once, each = bound(gpu_limits, shared), bound(gpu_limits, alike)
    assert once.prompts_s == pytest.approx(each.prompts_s / 375, rel=0.2)
    read_again_s = 499 * 1_500 * 131_072 / COPY
    assert each.decodes_s - once.decodes_s == pytest.approx(read_again_s, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tpot_ms", "tokens_per_s"),
    [("L1", 3.5, None), ("L64", 3.9, None), ("W1", None, 16_600), ("W3", None, 475)],
)
def test_the_limits_that_docs_performance_names(
    gpu_limits: ModuleType, name: str, tpot_ms: float | None, tokens_per_s: float | None
) -> None:
    found = bound(gpu_limits, importlib.import_module("workloads").WORKLOADS[name]())

    if tpot_ms is not None:
        assert found.tpot_ms == pytest.approx(tpot_ms, rel=0.015)
    else:
        assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.015)


def test_a_share_of_one_is_the_limit(gpu_limits: ModuleType) -> None:
    workload, limits = [([1] * 10, 128)], gpu_limits.Limits(COPY, MATMUL)
    least = gpu_limits.bound_of(workload, limits)

    assert gpu_limits.figure_of("L1", 2 * least.tpot_ms, 0.0, workload, limits).share == pytest.approx(0.5)
    assert gpu_limits.figure_of("W1", 0.0, least.tokens_per_s / 2, workload, limits).share == pytest.approx(0.5)
