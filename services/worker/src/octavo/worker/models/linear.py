"""Dense layers, their weights stored as the device multiplies them fastest."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_FOR_ROWS = 64
"""Rows that oneDNN lays the weight out for; the layout serves 1 to 64 rows about as well as one made for each."""


class Linear(ABC):
    """y = x W^T + b."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features]."""

    @abstractmethod
    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual`, which may be overwritten, plus the layer's output, both [num_tokens, out_features]."""


def make_linear(weight: Tensor, bias: Tensor | None = None, single: Tensor | None = None) -> Linear:
    """The fastest layer for the weight's device and type.

    `weight` is [out_features, in_features]. `single` may be the same weight, [in_features, out_features], if there is
    memory for both; it serves single rows where the other copy would be slower.
    """
    return PackedLinear(weight, bias, single) if can_pack(weight.dtype, weight.device) else PlainLinear(weight, bias)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this kind get a layout of their own."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class PlainLinear(Linear):
    """Any device and type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See Linear."""
        out = residual.addmm_(x, self.weight.t())
        return out if self.bias is None else out.add_(self.bias)


class PackedLinear(Linear):
    """float32 on a CPU: the weight in oneDNN's blocked layout, which halves the time of a decode step of 8 rows.

    A plain product of few rows copies the whole weight into such a layout every time; that of one row does not, and is
    a quarter faster than a packed one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, single: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
        self._single = single
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        if self._single is not None and len(x) == 1:
            return torch.mm(x, self._single) if self._bias is None else torch.addmm(self._bias, x, self._single)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See Linear."""
        if self._single is not None and len(x) == 1:
            out = torch.addmm(residual, x, self._single)
            return out if self._bias is None else out.add_(self._bias)
        packed: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
        return packed
