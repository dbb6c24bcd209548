"""The bodies and events of OpenAI's responses."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from octavo.gateway import sse
from octavo.gateway.chat_deltas import parts_of
from octavo.gateway.chat_logprobs import TokenEntries
from octavo.gateway.chat_preparation import PreparedChat
from octavo.gateway.choice_output import Delta
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.http_errors import ErrorReport
from octavo.gateway.response_output import Event, ResponseOutput
from octavo.gateway.responses_schema import ResponsesRequest
from octavo.gateway.text_tokens import TextTokens

Store = Callable[[dict[str, Any]], Awaitable[bool]]
"""Stores the response. False if that failed."""
CountTokens = Callable[[str], Awaitable[int]]


class ResponseFormat:
    """Events are numbered from 0. The response is stored before its last event is sent."""

    def __init__(
        self,
        response_id: str,
        chat: PreparedChat,
        request: ResponsesRequest,
        store: Store | None,
        count_tokens: CountTokens,
        pieces: TokenPieces,
    ) -> None:
        self._reader = chat.reading.reader()
        self._text_tokens = TextTokens(self._reader) if request.wants_logprobs else None
        self._entries = TokenEntries(pieces)
        self._output = ResponseOutput()
        self._store, self._count_tokens = store, count_tokens
        self._num_events = 0
        self._finish_reason: str | None = None
        self._response = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": chat.model.model_name,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": store is not None,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": _form(request)},
            "tool_choice": _dumped(request.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in request.tools or []],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def start(self, usage: dict[str, Any]) -> bytes:
        return self._events(
            {"type": event_type, "response": self._response}
            for event_type in ("response.created", "response.in_progress")
        )

    def chunk(self, choice: int, delta: Delta, usage: Callable[[], dict[str, Any]]) -> bytes:
        self._finish_reason = delta.finish_reason
        return self._events(self._grow(delta))

    async def end(self, usage: dict[str, Any]) -> bytes:
        last = self._events(self._output.close(self._status()))
        await self._complete(usage)
        return last + self._events([{"type": f"response.{self._status()}", "response": self._response}])

    def texts(self, choice: int) -> None:
        """Each event has a number of its own."""

    def failure(self, report: ErrorReport) -> bytes:
        error = {"code": report.body["error"]["code"] or "server_error", "message": report.body["error"]["message"]}
        self._response |= {"status": "failed", "error": error, "output": self._output.items}
        return self._events([{"type": "response.failed", "response": self._response}])

    async def body(self, choices: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        [whole] = choices
        self._finish_reason = whole.finish_reason
        for _ in self._grow(whole):
            pass
        for _ in self._output.close(self._status()):
            pass
        await self._complete(usage)
        return self._response

    def _grow(self, delta: Delta) -> Iterator[Event]:
        if self._text_tokens is None:
            for part in parts_of(self._reader, delta):
                yield from self._output.add(part)
            return
        for part, tokens in self._text_tokens.parts(delta):
            yield from self._output.add(part, self._entries.of(tokens))

    def _events(self, events: Iterable[Event]) -> bytes:
        encoded = []
        for event in events:
            encoded.append(sse.named_event({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(encoded)

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    async def _complete(self, usage: dict[str, Any]) -> None:
        reasoning = self._output.reasoning()
        self._response |= {
            "status": self._status(),
            "incomplete_details": {"reason": "max_output_tokens"} if self._finish_reason == "length" else None,
            "output": self._output.items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {
                    "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": await self._count_tokens(reasoning) if reasoning else 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        if self._store is not None:
            self._response["store"] = await self._store(self._response)


def _form(request: ResponsesRequest) -> dict[str, Any]:
    form = request.text.format if request.text is not None else None
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _dumped(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
