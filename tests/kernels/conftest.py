"""The kernels run on the GPU if there is one, else in Triton's interpreter; without Triton they are skipped."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
