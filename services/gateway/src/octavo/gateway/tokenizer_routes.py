"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request

from octavo.gateway.chat_preparation import ChatPreparation
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError
from octavo.gateway.limits import at_most
from octavo.gateway.openai_schema import ChatRequest, json_object, validated
from octavo.gateway.openapi import body_of
from octavo.gateway.request_checks import served_model
from octavo.gateway.request_context import read_body
from octavo.gateway.token_ids import check_token_ids
from octavo.gateway.tokenization import ModelTokenizer
from octavo.gateway.tokenizer_schema import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from octavo.gateway.worker_groups import WorkerGroups

MAX_DETOKENIZED = 131_072


def router(config: GatewayConfig, client: WorkerGroups, tokenizer: ModelTokenizer, chats: ChatPreparation) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> TokenizeAnswer:
        body = validated(TokenizeRequest, json_object(await read_body(request, config.max_body_bytes)))
        model = served_model(client, body.model)
        token_ids = await _encode(body, tokenizer, chats)
        names = [tokenizer.pieces.name(token_id) for token_id in token_ids] if body.return_token_strs else None
        return TokenizeAnswer(
            count=len(token_ids), max_model_len=model.max_model_len, tokens=token_ids, token_strs=names
        )

    @routes.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> DetokenizeAnswer:
        body = validated(DetokenizeRequest, json_object(await read_body(request, config.max_body_bytes)))
        at_most("tokens", len(body.tokens), MAX_DETOKENIZED, "ids")
        check_token_ids(body.tokens, "tokens", served_model(client, body.model).vocab_size)
        return DetokenizeAnswer(prompt=await tokenizer.decode(body.tokens))

    return routes


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
    [token_ids] = await tokenizer.encode([body.prompt or ""], body.add_special_tokens is not False)
    return token_ids
