"""Packed little-endian arrays in `bytes` fields."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection
from typing import Any

from octavo.common.errors import ProtocolError

_IS_BIG_ENDIAN = sys.byteorder == "big"


def _bytes(packed: array[Any]) -> bytes:
    if _IS_BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def _unpack_array(typecode: str, data: bytes) -> array[Any]:
    try:
        values: array[Any] = array(typecode, data)
    except ValueError as error:
        raise ProtocolError(f"array of {len(data)} bytes: {error}") from error
    if _IS_BIG_ENDIAN:
        values.byteswap()
    return values


def pack_int32(values: Collection[int]) -> bytes:
    return _bytes(array("i", values)) if values else b""  # one copy of memory if `values` is such an array


def unpack_int32(data: bytes) -> list[int]:
    return _unpack_array("i", data).tolist() if data else []


def unpack_int32_array(data: bytes) -> array[int]:
    """As `unpack_int32`, without making an object of each item."""
    return _unpack_array("i", data)


def pack_int64(values: Collection[int]) -> bytes:
    return _bytes(array("q", values)) if values else b""


def unpack_int64(data: bytes) -> list[int]:
    return _unpack_array("q", data).tolist() if data else []


def pack_float32(values: Collection[float]) -> bytes:
    return _bytes(array("f", values)) if values else b""


def unpack_float32(data: bytes) -> list[float]:
    return _unpack_array("f", data).tolist() if data else []


def pack_float64(values: Collection[float]) -> bytes:
    return _bytes(array("d", values)) if values else b""


def unpack_float64(data: bytes) -> list[float]:
    return _unpack_array("d", data).tolist() if data else []
