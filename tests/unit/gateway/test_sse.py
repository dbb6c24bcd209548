"""Framing of events."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway import sse

FRAME = sse.ChunkFrame({"id": "chatcmpl-1", "model": '"\\u0000"'}, has_usage=True)


def choice(text: str) -> dict[str, object]:
    return {"index": 3, "delta": {"content": text}, "finish_reason": None}


@given(st.text())
def test_event_around_a_text_is_the_event_that_is_encoded_whole(text: str) -> None:
    assert FRAME.texts(choice(sse.TEXT)).event(text) == FRAME.chunk(choice(text))


@pytest.mark.parametrize("has_usage", [False, True])
def test_event_has_the_envelope_the_choice_and_the_absent_usage(has_usage: bool) -> None:
    frame = sse.ChunkFrame({"id": "a"}, has_usage=has_usage)
    body = orjson.loads(frame.texts(choice(sse.TEXT)).event('x"\n').removeprefix(b"data: "))
    assert body == {"id": "a", "choices": [choice('x"\n')]} | ({"usage": None} if has_usage else {})
