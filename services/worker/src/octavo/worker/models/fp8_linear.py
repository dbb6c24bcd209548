"""Dense layers of e4m3: a scale for each output of the weight, and one for each token, found as it comes."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.worker.models.errors import ModelLoadError
from octavo.worker.models.linear import Linear, make_linear

LARGEST = torch.finfo(torch.float8_e4m3fn).max
LEAST_SCALE = 1e-12
"""Of a row of zeros."""
MULTIPLE = 16
"""Features of a layer that a GPU's product takes are a multiple of it."""
FIRST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs that know e4m3."""


def to_rows_of_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [num_rows, size] and float32 scales [num_rows, 1]: the largest magnitude of a row becomes 448."""
    exact = x.float()
    scales = (exact.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(LEAST_SCALE)
    return (exact / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def check_fp8_device(device: torch.device) -> None:
    """Raise ModelLoadError if the GPU has no e4m3; a CPU computes in float32 what it stores in e4m3."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        raise ModelLoadError(f"{torch.cuda.get_device_name(device)} has no 8-bit floating point, which fp8 needs")


def make_fp8_linear(weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """The layer for the weight's device and activations of `dtype`.

    `weight` is e4m3 [out_features, in_features], `scales` float32 [out_features, 1]. Raises ModelLoadError if the
    device cannot compute it.
    """
    if weight.device.type != "cuda" or dtype == torch.float32:
        return DequantizedLinear(weight, scales, bias, dtype)
    if dtype != torch.bfloat16:
        raise ModelLoadError("fp8 weights give bfloat16 on a GPU: set dtype to bfloat16")
    check_fp8_device(weight.device)
    if any(size % MULTIPLE for size in weight.shape):
        raise ModelLoadError(f"fp8 weights on a GPU need sizes that {MULTIPLE} divides; one is {list(weight.shape)}")
    from octavo.worker.models.scaled_linear import ScaledLinear  # imports Triton, which CPUs do without

    return ScaledLinear(weight, scales, bias)


class DequantizedLinear(Linear):
    """The reference: activations rounded as for a product of e4m3, multiplied in the type that they had."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._linear = make_linear((weight.float() * scales).to(dtype), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self._linear(_rounded(x))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See Linear."""
        return self._linear.add_to(residual, _rounded(x))


def _rounded(x: Tensor) -> Tensor:
    stored, scales = to_rows_of_e4m3(x)
    return (stored.float() * scales).to(x.dtype)
