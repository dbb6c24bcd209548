"""Bodies of Anthropic's Messages API, and what they are as a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from octavo.gateway.openai_schema import MAX_MESSAGES, MAX_PARTS, PositiveInt, ToolName
from octavo.gateway.request_body import RequestBody

_CacheControl = dict[str, Any] | None


class TextBlock(RequestBody):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: _CacheControl = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolUseBlock(RequestBody):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: ToolName
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    cache_control: _CacheControl = None


class ToolResultBlock(RequestBody):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: _CacheControl = None


class ThinkingBlock(RequestBody):
    """Reasoning in an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock


class Message(RequestBody):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS)]


class ToolDefinition(RequestBody):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: _CacheControl = None


class ToolChoice(RequestBody):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    """With `tool`: which."""
    disable_parallel_tool_use: bool | None = None
    """Give the first call only."""


class Thinking(RequestBody):
    """Whether the model reasons before it answers. Only models that mark reasoning take `enabled`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = None
    """Passes without effect."""
    display: str | None = None
    """Passes without effect."""


class PromptRequest(RequestBody):
    """What a prompt is made of."""

    model: str
    """Name of the served model."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The turns. If the last one is the assistant's, the answer goes on from its text."""
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    """What the model is told before them."""
    tools: list[ToolDefinition] | None = None
    """Tools that the model may call."""
    tool_choice: ToolChoice | None = None
    """`auto`, the default with tools, or `none`; `any` and `tool` force a call."""
    thinking: Thinking | None = None
    """Sets the variable `enable_thinking` of the model's chat template."""
    cache_control: _CacheControl = None
    """Passes without effect, here and in blocks: every prefix is cached."""


class CountTokensRequest(PromptRequest):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptRequest):
    """POST /v1/messages."""

    max_tokens: PositiveInt
    """Output tokens."""
    stop_sequences: list[str] | None = None
    """The text ends before the first of these."""
    stream: bool | None = None
    """Send server-sent events. Default false."""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """Default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Default 1: keep all."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Default 0: keep all."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds, as for chat."""
    metadata: dict[str, Any] | None = None
    """Passes without effect."""
    service_tier: Literal["auto", "standard_only"] | None = None
    """Passes without effect."""


def chat_fields(request: PromptRequest) -> dict[str, Any]:
    """The request as the fields of a chat request."""
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": _messages(request),
        "continue_final_message": request.messages[-1].role == "assistant",
    }
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice is not None:
        fields |= _tool_choice(request.tool_choice)
    if request.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": request.thinking.type != "disabled"}
    if isinstance(request, MessagesRequest):
        fields |= {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "timeout": request.timeout,
        }
    return fields


CHAT_PARAMS = {"stop": "stop_sequences", ".function.parameters": ".input_schema", ".function.": "."}
"""Fields that are called otherwise as fields of a chat request."""


def _messages(request: PromptRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    for turn in request.messages:
        if turn.role == "user":
            messages += _user_messages(turn)
        else:
            messages.append(_assistant_message(turn))
    return messages


def _user_messages(turn: Message) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before the text."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    messages = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
        for block in turn.content
        if isinstance(block, ToolResultBlock)
    ]
    texts = [block for block in turn.content if isinstance(block, TextBlock)]
    if texts or not messages:
        messages.append({"role": "user", "content": _text(texts)})
    return messages


def _assistant_message(turn: Message) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _text([block for block in turn.content if isinstance(block, TextBlock)]),
    }
    thoughts = [block.thinking for block in turn.content if isinstance(block, ThinkingBlock)]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": orjson.dumps(block.input).decode()}}
        for block in turn.content
        if isinstance(block, ToolUseBlock)
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    kinds: dict[str, Any] = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": kinds.get(choice.type, named)}
    if choice.disable_parallel_tool_use is not None:
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields
