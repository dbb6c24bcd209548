"""What the live view is sent: a stream of frames, JSON or columns of blocks, each with its length in front.

    0   uint32  bytes of payload
    4   uint8   1 JSON, 2 blocks
    5   uint8   1 if the payload is compressed (zlib), else 0
    6   2 bytes of zero
    8   payload

A payload of blocks is little-endian int32: the number of blocks, and the first of them if they are neighbours, else -1.
Then columns, one entry for each block: its id (only if the first is -1), generation, the block before it in its prefix
(see BlockChanges in kvmanager_service.proto), that one's generation, references; and a byte for its state.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import orjson

JSON, BLOCKS = 1, 2
HEADER = struct.Struct("<IBBxx")
_COMPRESS_ABOVE = 16_384


def json_frame(body: dict[str, Any]) -> bytes:
    return _frame(JSON, orjson.dumps(body))


def blocks_frame(
    first: int,
    block_ids: bytes,
    states: bytes,
    ref_counts: bytes,
    generations: bytes,
    parent_ids: bytes,
    parent_generations: bytes,
) -> bytes:
    """Columns as they travel between services: packed int32, a byte for each state. `first`: -1 if they have ids."""
    head = struct.pack("<ii", len(states), first)
    columns = (block_ids if first < 0 else b"", generations, parent_ids, parent_generations, ref_counts, states)
    return _frame(BLOCKS, b"".join((head, *columns)))


def compressed(frame: bytes) -> bytes:
    """The frame, smaller if that is worth it. Slow for large ones, and without the interpreter's lock."""
    if len(frame) < _COMPRESS_ABOVE:
        return frame
    _, kind, is_compressed = HEADER.unpack_from(frame)
    assert not is_compressed
    payload = zlib.compress(frame[HEADER.size :], 1)
    return HEADER.pack(len(payload), kind, 1) + payload


def _frame(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload), kind, 0) + payload
