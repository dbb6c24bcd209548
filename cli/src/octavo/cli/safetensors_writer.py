"""Writes a safetensors file one tensor at a time, so that a model larger than memory can be converted."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_FP32_BYTES = 4


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[tuple[str, NDArray[np.float32]]],
) -> None:
    """Write fp32 tensors, which must come in the order of `shapes`. Raises ValueError if one differs from its shape.

    Layout: uint64 header length, JSON header padded with spaces to 8 bytes, then the data without gaps.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + int(np.prod(shape)) * _FP32_BYTES
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for (expected, shape), (name, tensor) in zip(shapes.items(), tensors, strict=True):
            if name != expected or tensor.shape != shape:
                raise ValueError(f"tensor {name} of shape {tensor.shape} where {expected} of {shape} was announced")
            file.write(np.ascontiguousarray(tensor, dtype="<f4").data)
