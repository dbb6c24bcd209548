"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.gateway import sse
from octavo.gateway.answer_schema import ChatCompletion
from octavo.gateway.body_reading import read_body
from octavo.gateway.chat_deltas import ChatDeltas
from octavo.gateway.chat_logprobs import TokenEntries
from octavo.gateway.chat_preparation import ChatPreparation, PreparedChat
from octavo.gateway.choice_output import Delta
from octavo.gateway.config import GatewayConfig
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.http_errors import ErrorReport
from octavo.gateway.openai_schema import ChatRequest, parse_chat
from octavo.gateway.openapi import answers, body_of
from octavo.gateway.response_ids import CHAT_PREFIX

_NOTHING = Delta("", [], None, None)


class ChatFormat:
    """The bodies of chat completions. The role stands in the first chunk of each choice, and nowhere else."""

    def __init__(self, request_id: str, chat: PreparedChat, pieces: TokenPieces) -> None:
        request = chat.request
        options = request.stream_options
        self._envelope = {"id": CHAT_PREFIX + request_id, "created": int(time.time()), "model": chat.model.model_name}
        self._chunk_envelope = {**self._envelope, "object": "chat.completion.chunk"}
        self._has_usage = bool(options and options.include_usage)
        self._frame = sse.ChunkFrame(self._chunk_envelope, has_usage=self._has_usage)
        self._prompt = chat.prompt
        self._has_logprobs = bool(request.logprobs)
        self._has_token_ids = bool(request.return_token_ids)
        self._pieces = pieces
        self._record, self._num_prompt_logprobs = chat.record, request.prompt_logprobs
        self._entries = TokenEntries(pieces, as_ids=bool(request.return_tokens_as_token_ids))
        self._begun: set[int] = set()
        self._reading = None if chat.reading.is_plain else chat.reading
        self._messages: dict[int, ChatDeltas] = {}
        self._tells_usage = bool(options and options.continuous_usage_stats)
        self._is_bare = not (self._has_logprobs or self._has_token_ids or self._tells_usage)
        """Nothing stands beside the text of a choice."""
        self._echoed = _echoed(request)
        self._texts: dict[int, sse.TextEvents] = {}
        """By choice, what is written around a text and nothing else."""

    def start(self, usage: dict[str, Any]) -> bytes:
        return b""

    def chunk(self, choice: int, delta: Delta, usage: Callable[[], dict[str, Any]]) -> bytes:
        if delta.finish_reason is None and (texts := self._texts.get(choice)) is not None:
            return texts.event(delta.text)
        usage_now = usage() if self._tells_usage else None
        if choice in self._begun:
            return self._chunk(choice, delta, usage_now)
        # The official client's accumulating helper needs choice 0 first.
        earlier = [other for other in range(choice) if other not in self._begun]
        before = b"".join([self._chunk(other, _NOTHING, usage_now) for other in earlier])
        return before + self._chunk(choice, delta, usage_now)

    def _chunk(self, choice: int, delta: Delta, usage: dict[str, Any] | None) -> bytes:
        is_first = choice not in self._begun
        if self._reading is not None:
            message = self._messages.setdefault(choice, ChatDeltas(self._reading.reader()))
            content = message.delta(delta)
            if not is_first and not content and not delta.tokens and delta.finish_reason is None:
                return b""
            finish_reason = message.finish_reason(delta)
            if is_first:
                content = {"role": "assistant", **content, "content": self._with_echo(content.get("content"))}
        else:
            content, finish_reason = {"content": delta.text} if delta.text else {}, delta.finish_reason
            if is_first:
                content = {"role": "assistant", "content": self._echoed + delta.text}
        frame = self._frame
        if is_first:
            if not self._begun and self._has_token_ids:
                envelope = {**self._chunk_envelope, "prompt_token_ids": list(self._prompt.token_ids)}
                frame = sse.ChunkFrame(envelope, has_usage=self._has_usage)
            self._begun.add(choice)
            if self._is_bare and self._reading is None:
                content_of_text = {"content": sse.TEXT}
                self._texts[choice] = frame.texts(self._choice(choice, "delta", content_of_text, _NOTHING, None))
        return frame.chunk(self._choice(choice, "delta", content, delta, finish_reason), usage)

    async def end(self, usage: dict[str, Any]) -> bytes:
        return self._frame.end(usage)

    def texts(self, choice: int) -> sse.TextEvents | None:
        return self._texts.get(choice)

    def failure(self, report: ErrorReport) -> bytes:
        return sse.event(report.body)

    async def body(self, choices: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            **self._envelope,
            "object": "chat.completion",
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage,
        }
        if self._num_prompt_logprobs is not None:
            body["prompt_logprobs"] = self._record.shown(self._pieces, self._num_prompt_logprobs)
        if self._has_token_ids:
            body["prompt_token_ids"] = list(self._prompt.token_ids)
        return body

    def _whole_choice(self, index: int, choice: Delta) -> dict[str, Any]:
        if self._reading is None:
            message: dict[str, Any] = {"role": "assistant", "content": self._echoed + choice.text}
            return self._choice(index, "message", message, choice, choice.finish_reason)
        deltas = ChatDeltas(self._reading.reader())
        message = deltas.message(choice)
        message["content"] = self._with_echo(message["content"])
        return self._choice(index, "message", message, choice, deltas.finish_reason(choice))

    def _with_echo(self, content: str | None) -> str | None:
        return self._echoed + (content or "") if self._echoed else content

    def _choice(
        self, index: int, key: str, content: dict[str, Any], delta: Delta, finish_reason: str | None
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": index,
            key: content,
            "logprobs": {"content": self._entries.of(delta.tokens)} if self._has_logprobs else None,
            "finish_reason": finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._has_token_ids:
            entry["token_ids"] = [token.token_id for token in delta.tokens]
        return entry


def _echoed(request: ChatRequest) -> str:
    last = request.messages[-1].for_template()
    return str(last["content"]) if request.echo and last["role"] == "assistant" else ""


def router(config: GatewayConfig, chats: ChatPreparation, pieces: TokenPieces) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(
        "/v1/chat/completions", openapi_extra=body_of(ChatRequest), responses=answers(ChatCompletion, streams=True)
    )
    async def create_chat_completion(request: Request) -> Response:
        chat = await chats.prepare(parse_chat(await read_body(request, config.max_body_bytes)))
        return chats.response(request, chat, ChatFormat(request.state.request_id, chat, pieces))

    return routes
