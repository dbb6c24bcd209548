"""Shapes of answers, for /openapi.json. The formats write plain dictionaries of these shapes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """An error of Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class CachedTokens(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionChoice(BaseModel):
    """One text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AnsweredFunction(BaseModel):
    """What is called."""

    name: str
    arguments: str


class AnsweredCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class AnsweredMessage(BaseModel):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredCall] = []


class ChatChoice(BaseModel):
    """One message."""

    index: int
    message: AnsweredMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class MessageUsage(BaseModel):
    """Token counts of a message."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(BaseModel):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(BaseModel):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class ResponseBody(BaseModel):
    """A response of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    usage: dict[str, Any]


class DeletedResponse(BaseModel):
    """What was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(BaseModel):
    """A page of input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ModelEntry(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"]
    data: list[ModelEntry]
