"""The output items of a response, and the events that tell how they grow."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.gateway.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning

Event = dict[str, Any]


class ResponseOutput:
    """Owns the items. One is open at a time, the last."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._text = ""
        """Text or arguments of the open item so far."""
        self._logprobs: list[dict[str, Any]] = []
        """Of its text, if they are asked for."""

    def add(self, part: AnswerPart, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """Take the next part of the answer; the events that it causes, without their sequence numbers."""
        if isinstance(part, CallStart):
            yield from self.close()
            yield from self._open(
                "fc_", type="function_call", call_id=part.call_id, name=part.name, arguments="", status="in_progress"
            )
            return
        if isinstance(part, CallArguments):
            yield self._grow("response.function_call_arguments.delta", part.text)
            return
        kind = "reasoning" if isinstance(part, Reasoning) else "message"
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self.close()
            yield from self._open_text(part)
        if isinstance(part, Content):
            self._logprobs += logprobs
            event = self._grow("response.output_text.delta", part.text)
            yield {**event, "content_index": 0, "logprobs": list(logprobs)}
        else:
            yield {**self._grow("response.reasoning_text.delta", part.text), "content_index": 0}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """No more comes of the item that is open."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        match item["type"]:
            case "function_call":
                item["arguments"] = self._text
                yield self._of_item("response.function_call_arguments.done", arguments=self._text, name=item["name"])
            case "message":
                part = _text_part(self._text, self._logprobs)
                item["content"] = [part]
                yield self._of_item(
                    "response.output_text.done", content_index=0, text=self._text, logprobs=self._logprobs
                )
                yield self._of_item("response.content_part.done", content_index=0, part=part)
            case _:
                item["content"] = [{"type": "reasoning_text", "text": self._text}]
                yield self._of_item("response.reasoning_text.done", content_index=0, text=self._text)
                yield self._of_item("response.content_part.done", content_index=0, part=item["content"][0])
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(item["content"][0]["text"] for item in self.items if item["type"] == "reasoning")

    def _open(self, id_prefix: str, **fields: Any) -> Iterator[Event]:
        self._text, self._logprobs, self._is_open = "", [], True
        item = {"id": id_prefix + secrets.token_hex(16), **fields}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _open_text(self, part: AnswerPart) -> Iterator[Event]:
        if isinstance(part, Reasoning):
            yield from self._open("rs_", type="reasoning", summary=[], content=[], status="in_progress")
            first: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            yield from self._open("msg_", type="message", role="assistant", content=[], status="in_progress")
            first = _text_part("", [])
        yield self._of_item("response.content_part.added", content_index=0, part=first)

    def _grow(self, event_type: str, text: str) -> Event:
        self._text += text
        return self._of_item(event_type, delta=text)

    def _of_item(self, event_type: str, **fields: Any) -> Event:
        return {"type": event_type, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
