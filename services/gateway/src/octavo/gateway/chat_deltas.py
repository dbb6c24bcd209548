"""The message of one choice of a chat whose text has parts: as deltas while it grows, or whole."""

from __future__ import annotations

from typing import Any

from octavo.gateway.answer_parts import AnswerPart, AnswerReader, CallArguments, CallStart, Content, Reasoning
from octavo.gateway.choice_output import Delta


class ChatDeltas:
    """Counts the calls of one choice."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._num_calls = 0

    def delta(self, delta: Delta) -> dict[str, Any]:
        """What is new of the message; empty if nothing is certain."""
        message: dict[str, Any] = {}
        for part in parts_of(self._reader, delta):
            match part:
                case Content(text):
                    message["content"] = message.get("content", "") + text
                case Reasoning(text):
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case CallStart(call_id, name):
                    function = {"name": name, "arguments": ""}
                    entry = {"index": self._num_calls, "id": call_id, "type": "function", "function": function}
                    message.setdefault("tool_calls", []).append(entry)
                    self._num_calls += 1
                case CallArguments(text):
                    calls = message.setdefault("tool_calls", [])
                    if not calls:
                        calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return message

    def message(self, whole: Delta) -> dict[str, Any]:
        """The whole message. Content is null where there are calls and no text."""
        found = self.delta(whole)
        calls = found.pop("tool_calls", None)
        message = {"role": "assistant", "content": None if calls else "", **found}
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return message

    def finish_reason(self, delta: Delta) -> str | None:
        """`tool_calls` if the choice ended of its own accord after a call."""
        return "tool_calls" if self._num_calls and delta.finish_reason == "stop" else delta.finish_reason


def parts_of(reader: AnswerReader, delta: Delta) -> list[AnswerPart]:
    """The parts that a delta brings, the last one of a choice with all that is left."""
    parts = reader.feed(delta.text)
    return parts if delta.finish_reason is None else parts + reader.end()
