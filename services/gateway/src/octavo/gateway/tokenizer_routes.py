"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import orjson
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from octavo.gateway.body_reading import read_body
from octavo.gateway.chat_preparation import ChatPreparation
from octavo.gateway.config import GatewayConfig
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.http_errors import FieldError
from octavo.gateway.limits import at_most
from octavo.gateway.openai_schema import ChatRequest
from octavo.gateway.openapi import answers, body_of
from octavo.gateway.request_body import json_object, validated
from octavo.gateway.request_checks import served_model
from octavo.gateway.token_ids import check_token_ids
from octavo.gateway.tokenization import ModelTokenizer
from octavo.gateway.tokenizer_schema import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from octavo.gateway.worker_groups import WorkerGroups

MAX_DETOKENIZED = 131_072
_SLICE = 4096
"""Tokens that are written at once: about 1 ms, with their texts."""


def router(config: GatewayConfig, client: WorkerGroups, tokenizer: ModelTokenizer, chats: ChatPreparation) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=body_of(TokenizeRequest), responses=answers(TokenizeAnswer))
    async def tokenize(request: Request) -> Response:
        body = validated(TokenizeRequest, json_object(await read_body(request, config.max_body_bytes)))
        model = served_model(client, body.model)
        token_ids = await _encode(body, tokenizer, chats)
        pieces = tokenizer.pieces if body.return_token_strs else None
        return StreamingResponse(_written(token_ids, model.max_model_len, pieces), media_type="application/json")

    @routes.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> DetokenizeAnswer:
        body = validated(DetokenizeRequest, json_object(await read_body(request, config.max_body_bytes)))
        at_most("tokens", len(body.tokens), MAX_DETOKENIZED, "ids")
        check_token_ids(body.tokens, "tokens", served_model(client, body.model).vocab_size)
        return DetokenizeAnswer(prompt=await tokenizer.decode(body.tokens))

    return routes


async def _written(token_ids: Sequence[int], max_model_len: int, pieces: TokenPieces | None) -> AsyncIterator[bytes]:
    """A TokenizeAnswer in slices, so that streams go on meanwhile; with the tokens' texts if there are pieces."""
    slices = [token_ids[start : start + _SLICE] for start in range(0, len(token_ids), _SLICE)]
    yield b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(token_ids), max_model_len)
    for index, ids in enumerate(slices):
        yield b"," * bool(index) + orjson.dumps(ids)[1:-1]
        await asyncio.sleep(0)
    if pieces is None:
        yield b'],"token_strs":null}'
        return
    yield b'],"token_strs":['
    for index, ids in enumerate(slices):
        yield b"," * bool(index) + orjson.dumps([pieces.name(token_id) for token_id in ids])[1:-1]
        await asyncio.sleep(0)
    yield b"]}"


async def _encode(body: TokenizeRequest, tokenizer: ModelTokenizer, chats: ChatPreparation) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "prompt: give either a prompt or messages", "invalid_value")
    if body.messages is not None:
        if body.add_special_tokens:
            message = "add_special_tokens: messages get what the chat template writes"
            raise FieldError("add_special_tokens", message, "unsupported_parameter")
        chat = ChatRequest(messages=body.messages, tools=body.tools, chat_template_kwargs=body.chat_template_kwargs)
        return await chats.prompt_token_ids(chat)
    for param in ("tools", "chat_template_kwargs"):
        if getattr(body, param):
            raise FieldError(param, f"{param}: is only allowed with messages", "invalid_value")
    [token_ids] = await tokenizer.encode([body.prompt or ""], body.add_special_tokens is not False, aside=True)
    return token_ids
