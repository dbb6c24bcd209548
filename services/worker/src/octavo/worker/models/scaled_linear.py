"""Dense layers of e4m3 on a GPU: its matrix units multiply e4m3 and the scales are applied to the sums."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.worker.kernels.quantize_rows import quantize_rows
from octavo.worker.models.linear import Linear


class ScaledLinear(Linear):
    """Activations of `dtype` in and out; a GPU computes bfloat16 alone."""

    def __init__(
        self, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """`weight` is e4m3 [out_features, in_features], dense, `scales` float32 [out_features, 1]."""
        self._dtype = dtype
        self._weight = weight.t()  # [in_features, out_features] by columns, as the product wants it
        self._scales = scales.t().contiguous()  # [1, out_features]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        return self.product(*quantize_rows(x))

    def product(self, stored: Tensor, scales: Tensor) -> Tensor:
        """The output for rows of e4m3, dense, times float32 `scales` [num_tokens, 1]."""
        out = torch._scaled_mm(
            stored,
            self._weight,
            scale_a=scales,
            scale_b=self._scales,
            out_dtype=self._dtype,
            use_fast_accum=True,
        )
        return out if self._bias is None else out.add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """See Linear."""
        return residual.add_(self(x))
