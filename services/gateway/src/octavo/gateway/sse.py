"""Framing of server-sent events."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
TEXT = "\0"
"""Stands for the text in the choice that `ChunkFrame.texts` gets."""
_ENCODED_TEXT = orjson.dumps(TEXT)


def event(body: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """One event that has its `type` also as the event's name."""
    return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), orjson.dumps(body))


class TextEvents:
    """Events that differ in one text only: everything around it is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, before: bytes, after: bytes) -> None:
        self._before, self._after = before, after

    def event(self, text: str) -> bytes:
        """One event."""
        return self._before + orjson.dumps(text) + self._after


class ChunkFrame:
    """Events of one stream that differ in their last fields only; the others are encoded once.

    With usage the token counts come in an event of their own at the end, and are null in those that do not tell them.
    """

    def __init__(self, envelope: dict[str, Any], *, has_usage: bool) -> None:
        self._envelope, self._has_usage = envelope, has_usage
        self._prefix = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"

    def chunk(self, choice: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        """An event with one choice, and the token counts so far if it is to tell them."""
        suffix = self._suffix if usage is None else b'],"usage":' + orjson.dumps(usage) + b"}\n\n"
        return self._prefix + orjson.dumps(choice) + suffix

    def texts(self, choice: dict[str, Any]) -> TextEvents:
        """Events with one choice that differ in its text only."""
        before, after = orjson.dumps(choice).split(_ENCODED_TEXT)
        return TextEvents(self._prefix + before, after + self._suffix)

    def end(self, usage: dict[str, Any]) -> bytes:
        """What ends the stream."""
        return (event({**self._envelope, "choices": [], "usage": usage}) if self._has_usage else b"") + DONE
