"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.gateway import sse
from octavo.gateway.cache_salt import salt_of
from octavo.gateway.choice_output import Delta, OutputToken
from octavo.gateway.completions import output_rules
from octavo.gateway.config import GatewayConfig
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.generation_response import GenerationJob, GenerationResponse
from octavo.gateway.logprobs import finite
from octavo.gateway.openai_schema import ChatRequest, parse_chat
from octavo.gateway.request_checks import check_options, complete_prompt, served_model
from octavo.gateway.request_context import read_body
from octavo.gateway.response_ids import CHAT_PREFIX
from octavo.gateway.scheduler_client import Prompt, SchedulerClient
from octavo.gateway.tokenization import ModelTokenizer


class ChatFormat:
    """The bodies of chat completions. The role stands in the first chunk of each choice, and nowhere else."""

    def __init__(
        self, request_id: str, model_name: str, prompt: Prompt, request: ChatRequest, pieces: TokenPieces
    ) -> None:
        options = request.stream_options
        self._envelope = {"id": CHAT_PREFIX + request_id, "created": int(time.time()), "model": model_name}
        self._chunk_envelope = {**self._envelope, "object": "chat.completion.chunk"}
        self._usage_is_null = bool(options and options.include_usage)
        self._frame = sse.ChunkFrame(self._chunk_envelope, usage_is_null=self._usage_is_null)
        self._prompt = prompt
        self._has_logprobs = bool(request.logprobs)
        self._has_token_ids = bool(request.return_token_ids)
        self._pieces = pieces
        self._begun: set[int] = set()

    def chunk(self, choice: int, delta: Delta) -> bytes:
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        frame = self._frame
        if choice not in self._begun:
            content = {"role": "assistant", "content": delta.text}
            if not self._begun and self._has_token_ids:
                envelope = {**self._chunk_envelope, "prompt_token_ids": list(self._prompt.token_ids)}
                frame = sse.ChunkFrame(envelope, usage_is_null=self._usage_is_null)
            self._begun.add(choice)
        return frame.chunk(self._choice(choice, "delta", content, delta))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return sse.event({**self._chunk_envelope, "choices": [], "usage": usage})

    def body(self, choices: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {
            **self._envelope,
            "object": "chat.completion",
            "choices": [
                self._choice(index, "message", {"role": "assistant", "content": choice.text}, choice)
                for index, choice in enumerate(choices)
            ],
            "usage": usage,
        }
        if self._has_token_ids:
            body["prompt_token_ids"] = list(self._prompt.token_ids)
        return body

    def _choice(self, index: int, key: str, content: dict[str, Any], delta: Delta) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": index,
            key: content,
            "logprobs": {"content": [self._entry(token) for token in delta.tokens]} if self._has_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._has_token_ids:
            entry["token_ids"] = [token.token_id for token in delta.tokens]
        return entry

    def _entry(self, token: OutputToken) -> dict[str, Any]:
        """`bytes` are what the token adds to the text; null if it adds nothing, as special tokens do."""
        logprobs = token.logprobs
        if logprobs is None:
            return {"token": self._pieces.name(token.token_id), "logprob": None, "bytes": None, "top_logprobs": []}
        pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
        return {
            "token": self._pieces.name(token.token_id),
            "logprob": finite(logprobs.sampled),
            "bytes": None if token.piece is None else list(token.piece),
            "top_logprobs": [
                {
                    "token": self._pieces.name(token_id),
                    "logprob": finite(value),
                    "bytes": list(self._pieces.all[token_id]),
                }
                for token_id, value in pairs
            ],
        }


def router(config: GatewayConfig, client: SchedulerClient, tokenizer: ModelTokenizer) -> APIRouter:
    """The route."""
    routes = APIRouter()
    schema = {"requestBody": {"content": {"application/json": {"schema": ChatRequest.model_json_schema()}}}}

    @routes.post("/v1/chat/completions", openapi_extra=schema)
    async def create_chat_completion(request: Request) -> Response:
        body = parse_chat(await read_body(request, config.max_body_bytes))
        model = served_model(client, body.model)
        options = check_options(body, 1, config, model)
        token_ids = await tokenizer.encode_chat([message.for_template() for message in body.messages])
        prompt = complete_prompt(token_ids, "messages", options, model)
        request_id = request.state.request_id
        return GenerationResponse(
            client,
            GenerationJob(
                request_id=request_id,
                prompts=[prompt],
                num_returned=options.num_returned,
                cache_salt=salt_of(config, body.cache_salt),
                rules=output_rules(body, options, model, tokenizer.pieces),
                answer_format=ChatFormat(request_id, model.model_name, prompt, body, tokenizer.pieces),
                is_stream=bool(body.stream),
                includes_usage=bool(body.stream_options and body.stream_options.include_usage),
                received_s=request.state.received_s,
            ),
        )

    return routes
