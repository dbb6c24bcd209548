"""Kernels are compiled before they are launched, several at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler.errors import CompileTimeAssertionFailure

from octavo.worker.kernels.compile_ahead import compiling_ahead

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOO_MUCH = 100


@triton.jit
def _add_kernel(x_ptr, AMOUNT: tl.constexpr):  # noqa: N803
    tl.static_assert(AMOUNT < 100)
    tl.store(x_ptr, tl.load(x_ptr) + AMOUNT)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kernels that a launch had to compile."""
    found: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, key, **_: found.append(key))
    yield found


def test_what_is_missing_is_compiled_and_nothing_is_launched(missing: list[str]) -> None:
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    shares: list[float] = []
    _add_kernel[(1,)](x, 5)

    with compiling_ahead(shares.append):
        for amount in (1, 2, 3, 2, 5):
            _add_kernel[(1,)](x, amount)
    assert x.item() == 5, "it might have computed with what another has not"
    assert len(shares) == 3 and shares[-1] == 1.0
    num_compiled = len(missing)

    for amount in (1, 2, 3):
        _add_kernel[(1,)](x, amount)
    assert x.item() == 11
    assert len(missing) == num_compiled


def test_a_kernel_that_cannot_be_compiled_says_so_when_it_is_launched() -> None:
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    with compiling_ahead():
        _add_kernel[(1,)](x, TOO_MUCH)
    with pytest.raises(CompileTimeAssertionFailure):
        _add_kernel[(1,)](x, TOO_MUCH)
