"""The kernels run on the GPU if there is one, else in Triton's interpreter; where Triton has no wheel, not at all."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
