"""Packed little-endian arrays in `bytes` fields."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

from octavo.common.errors import ProtocolError


def _pack(typecode: str, values: Iterable[int] | Iterable[float]) -> bytes:
    packed = array(typecode, values)  # one copy of memory if `values` is such an array
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack_array(typecode: str, data: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    if len(data) % values.itemsize:
        raise ProtocolError(f"array of {len(data)} bytes is not a whole number of {values.itemsize}-byte items")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _unpack(typecode: str, data: bytes) -> list[Any]:
    return _unpack_array(typecode, data).tolist()


def pack_int32(values: Iterable[int]) -> bytes:
    return _pack("i", values)


def unpack_int32(data: bytes) -> list[int]:
    return _unpack("i", data)


def unpack_int32_array(data: bytes) -> array[int]:
    """As `unpack_int32`, without making an object of each item."""
    return _unpack_array("i", data)


def pack_int64(values: Iterable[int]) -> bytes:
    return _pack("q", values)


def unpack_int64(data: bytes) -> list[int]:
    return _unpack("q", data)


def pack_float32(values: Iterable[float]) -> bytes:
    return _pack("f", values)


def unpack_float32(data: bytes) -> list[float]:
    return _unpack("f", data)
