"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from octavo.gateway.answer_schema import AnthropicMessage, InputTokens
from octavo.gateway.anthropic_format import MessageFormat
from octavo.gateway.anthropic_schema import (
    CHAT_PARAMS,
    CountTokensRequest,
    MessagesRequest,
    PromptRequest,
    ToolResultBlock,
    ToolUseBlock,
    chat_fields,
)
from octavo.gateway.body_reading import read_body
from octavo.gateway.chat_preparation import ChatPreparation
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError, renamed_fields
from octavo.gateway.openai_schema import ChatRequest
from octavo.gateway.openapi import ANTHROPIC_ERRORS, answers, body_of
from octavo.gateway.request_body import json_object, validated


def router(config: GatewayConfig, chats: ChatPreparation) -> APIRouter:
    """The routes."""
    routes = APIRouter(responses=ANTHROPIC_ERRORS)

    @routes.post(
        "/v1/messages", openapi_extra=body_of(MessagesRequest), responses=answers(AnthropicMessage, streams=True)
    )
    async def create_message(request: Request) -> Response:
        body = validated(MessagesRequest, json_object(await read_body(request, config.max_body_bytes)))
        with renamed_fields(CHAT_PARAMS):
            chat = await chats.prepare(_as_chat(body, chats))
        return chats.response(request, chat, MessageFormat(request.state.request_id, chat))

    @routes.post("/v1/messages/count_tokens", openapi_extra=body_of(CountTokensRequest), responses=answers(InputTokens))
    async def count_tokens(request: Request) -> dict[str, int]:
        body = validated(CountTokensRequest, json_object(await read_body(request, config.max_body_bytes)))
        with renamed_fields(CHAT_PARAMS):
            return {"input_tokens": len(await chats.prompt_token_ids(_as_chat(body, chats)))}

    return routes


def _as_chat(body: PromptRequest, chats: ChatPreparation) -> ChatRequest:
    """Raises FieldError for what the schema does not tell."""
    for index, turn in enumerate(body.messages):
        misplaced = ToolUseBlock if turn.role == "user" else ToolResultBlock
        for place, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            if isinstance(block, misplaced):
                param = f"messages[{index}].content[{place}]"
                raise FieldError(param, f"{param}: a {block.type} has no place in a message of the {turn.role}")
    if body.thinking is not None and body.thinking.type == "enabled" and not chats.has_reasoning:
        raise FieldError("thinking", "thinking: this model does not mark reasoning", "unsupported_parameter")
    choice = body.tool_choice
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise FieldError("tool_choice.name", "tool_choice.name: goes with the type tool, and only with it")
    return validated(ChatRequest, chat_fields(body))
