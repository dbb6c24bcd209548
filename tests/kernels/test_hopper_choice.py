"""Which kernel attends by many queries, and that those for Hopper compile. tests/gpu tests what they compute."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from octavo.worker.kernels.hopper_kernels import hopper_kernels
from support.compile_for_hopper import compile_for_hopper

hopper_prefill = pytest.importorskip("octavo.worker.kernels.hopper_prefill")
hopper_prefix = pytest.importorskip("octavo.worker.kernels.hopper_prefix")


def tensors(**changed: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and a layer of the pool."""
    shape = {
        "head_dim": 128,
        "group": 4,
        "block_size": 16,
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
    } | changed
    query = torch.empty((5, 2 * shape["group"], shape["head_dim"]), dtype=shape["dtype"])  # type: ignore[operator, call-overload]
    cache = torch.empty((3, 2, 2, shape["block_size"], shape["head_dim"]), dtype=shape["kv_dtype"])  # type: ignore[call-overload]
    return query, cache


@pytest.fixture
def _any_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_prefill, "_compiles", lambda *shape: True)
    monkeypatch.setattr(hopper_prefix, "_compiles", lambda *shape: True)


@pytest.mark.usefixtures("_any_triton")
@pytest.mark.parametrize(
    "changed",
    [{}, {"group": 1}, {"group": 128}, {"block_size": 128}, {"dtype": torch.float16, "kv_dtype": torch.float16}],
)
def test_shapes_of_the_kernel_for_hopper(changed: dict[str, object]) -> None:
    assert hopper_prefill.serves(*tensors(**changed))
    assert hopper_prefix.serves(*tensors(**changed))


@pytest.mark.usefixtures("_any_triton")
@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 64},
        {"head_dim": 80},
        {"head_dim": 256},
        {"group": 129},
        {"block_size": 4},
        {"block_size": 256},
        {"block_size": 24},
        {"dtype": torch.float32, "kv_dtype": torch.float32},
        {"kv_dtype": torch.float8_e4m3fn},
    ],
)
def test_shapes_left_to_the_other_kernel(changed: dict[str, object]) -> None:
    assert not hopper_prefill.serves(*tensors(**changed))
    assert not hopper_prefix.serves(*tensors(**changed))


@pytest.mark.usefixtures("_any_triton")
def test_windows_soft_caps_and_scales_are_left_to_the_other_kernel() -> None:
    assert not hopper_prefill.serves(*tensors(), window=100)
    assert not hopper_prefill.serves(*tensors(), soft_cap=30.0)
    assert not hopper_prefill.serves(*tensors(), scales=torch.ones((2, 2)))
    assert not hopper_prefix.serves(*tensors(), soft_cap=30.0)
    assert not hopper_prefix.serves(*tensors(), scales=torch.ones((2, 2)))


def test_a_triton_that_refuses_the_kernel_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(*arguments: object, **constants: object) -> None:
        asked.append(constants)
        raise AttributeError("no such operation any more")

    monkeypatch.setattr(hopper_prefill._hopper_prefill_kernel, "warmup", refuse)
    hopper_prefill._compiles.cache_clear()

    assert not hopper_prefill.serves(*tensors())
    assert not hopper_prefill.serves(*tensors())
    assert [one["GROUP"] for one in asked] == [4]
    hopper_prefill._compiles.cache_clear()


@pytest.fixture
def _a_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    hopper_kernels.cache_clear()
    yield
    hopper_kernels.cache_clear()


@pytest.mark.usefixtures("_a_hopper")
def test_a_triton_without_gluon_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hopper_kernels("hopper_prefill") is hopper_prefill
    assert hopper_kernels("hopper_prefix") is hopper_prefix
    hopper_kernels.cache_clear()
    monkeypatch.delattr("octavo.worker.kernels.hopper_prefill")
    monkeypatch.setitem(sys.modules, "octavo.worker.kernels.hopper_prefill", None)
    assert hopper_kernels("hopper_prefill") is None


@pytest.mark.parametrize("kernel", ["prefill", "prefix"])
def test_it_compiles_to_what_hopper_has(kernel: str) -> None:
    block_size = 16
    shared_bytes, ptx = compile_for_hopper(kernel, str(block_size), "4", "bf16")

    assert shared_bytes <= 227 * 2**10
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k16") == 2 * 48  # two groups; first, whole, masked, last tile
    assert ptx.count("cp.async.bulk.tensor.2d") == 2 * 2 * 128 // block_size  # keys and values, two halves of a block
    assert "setmaxnreg" in ptx
