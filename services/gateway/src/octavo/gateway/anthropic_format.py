"""The bodies and events of Anthropic's messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from octavo.gateway import sse
from octavo.gateway.answer_parts import AnswerPart, CallArguments, CallStart, Content, Reasoning, joined
from octavo.gateway.chat_deltas import parts_of
from octavo.gateway.chat_preparation import PreparedChat
from octavo.gateway.choice_output import Delta
from octavo.gateway.http_errors import ErrorReport, anthropic_error
from octavo.gateway.response_ids import MESSAGE_PREFIX


class MessageFormat:
    """A message is a list of content blocks; in a stream one block is open at a time."""

    def __init__(self, request_id: str, chat: PreparedChat) -> None:
        self._message = {
            "id": MESSAGE_PREFIX + request_id,
            "type": "message",
            "role": "assistant",
            "model": chat.model.model_name,
        }
        self._request_id = request_id
        self._reader = chat.reading.reader()
        self._open: dict[str, Any] | None = None
        """The block that the stream is in."""
        self._num_blocks = 0
        self._has_calls = False
        self._last = Delta("", [], None, None)

    def start(self, usage: dict[str, Any]) -> bytes:
        message: dict[str, Any] = {
            **self._message,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }
        return sse.named_event({"type": "message_start", "message": message}) + sse.named_event({"type": "ping"})

    def chunk(self, choice: int, delta: Delta, usage: Callable[[], dict[str, Any]]) -> bytes:
        self._last = delta
        return b"".join([self._events(part) for part in parts_of(self._reader, delta)])

    async def end(self, usage: dict[str, Any]) -> bytes:
        body = {"type": "message_delta", "delta": self._stop(self._last), "usage": _usage(usage)}
        return self._close() + sse.named_event(body) + sse.named_event({"type": "message_stop"})

    def texts(self, choice: int) -> None:
        """Which block a text belongs to is for its reader to tell."""

    def failure(self, report: ErrorReport) -> bytes:
        return sse.named_event(anthropic_error(report, self._request_id))

    async def body(self, choices: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        [whole] = choices
        content: list[dict[str, Any]] = []
        for part in joined(parts_of(self._reader, whole)):
            if isinstance(part, CallArguments):
                content[-1]["input"] = _input(part.text)
            else:
                content.append(self._block(part))
                content[-1].update(_text_of(part))
        return {**self._message, "content": content, **self._stop(whole), "usage": _usage(usage)}

    def _events(self, part: AnswerPart) -> bytes:
        before = b""
        if not isinstance(part, CallArguments) and (
            isinstance(part, CallStart) or self._open is None or self._open["type"] != _type_of(part)
        ):
            before = self._close()
            self._open = self._block(part)
            index, self._num_blocks = self._num_blocks, self._num_blocks + 1
            before += sse.named_event({"type": "content_block_start", "index": index, "content_block": self._open})
        delta = _delta_of(part)
        if delta is None:
            return before
        body = {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
        return before + sse.named_event(body)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return sse.named_event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _block(self, part: AnswerPart) -> dict[str, Any]:
        """A block as it is when it begins."""
        match part:
            case Reasoning():
                return {"type": "thinking", "thinking": "", "signature": ""}
            case CallStart(call_id, name):
                self._has_calls = True
                return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
            case _:
                return {"type": "text", "text": ""}

    def _stop(self, delta: Delta) -> dict[str, Any]:
        reasons = {"stop": "tool_use" if self._has_calls else "end_turn", "length": "max_tokens"}
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        return {"stop_reason": reasons[delta.finish_reason or "stop"], "stop_sequence": None}


def _type_of(part: AnswerPart) -> str:
    return "thinking" if isinstance(part, Reasoning) else "text"


def _text_of(part: AnswerPart) -> dict[str, str]:
    match part:
        case Reasoning(text):
            return {"thinking": text}
        case Content(text):
            return {"text": text}
        case _:
            return {}


def _delta_of(part: AnswerPart) -> dict[str, str] | None:
    match part:
        case Reasoning(text):
            return {"type": "thinking_delta", "thinking": text}
        case Content(text):
            return {"type": "text_delta", "text": text}
        case CallArguments(text):
            return {"type": "input_json_delta", "partial_json": text}
    return None


def _input(arguments: str) -> Any:
    """The arguments of a call; empty if they broke off."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    """Here, tokens that were found in the prefix cache do not count as input tokens."""
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
    }
