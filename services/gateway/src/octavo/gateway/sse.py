"""Framing of server-sent events."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class ChunkFrame:
    """Events of one stream that differ in their last fields only; the others are encoded once."""

    def __init__(self, envelope: dict[str, Any], *, usage_is_null: bool) -> None:
        self._prefix = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if usage_is_null else b"]}\n\n"

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """An event with one choice."""
        return self._prefix + orjson.dumps(choice) + self._suffix
