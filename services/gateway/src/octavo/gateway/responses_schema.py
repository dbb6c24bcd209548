"""Bodies of OpenAI's Responses API, and what they are as a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.gateway.http_errors import FieldError
from octavo.gateway.openai_schema import MAX_MESSAGES, MAX_PARTS, PositiveInt, ToolName
from octavo.gateway.request_body import RequestBody

_Id = Annotated[str, Field(min_length=1, max_length=256)]
_Status = Literal["in_progress", "completed", "incomplete"] | None


class _Item(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    id: _Id | None = None
    status: _Status = None


class TextContent(BaseModel):
    """One piece of a message."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[TextContent], Field(max_length=MAX_PARTS)]
    phase: str | None = None


class FunctionCallItem(_Item):
    """A call of a tool in an earlier answer."""

    type: Literal["function_call"]
    call_id: _Id
    name: ToolName
    arguments: str


class FunctionCallOutputItem(_Item):
    """What a tool answered."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: str | Annotated[list[TextContent], Field(max_length=MAX_PARTS)]


class ReasoningText(BaseModel):
    """Reasoning."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning in an earlier answer."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] = []
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: None = None


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


class FunctionTool(RequestBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(RequestBody):
    """A function by its name."""

    type: Literal["function"]
    name: ToolName


class TextFormat(RequestBody):
    """Plain text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """With `json_schema`: the schema."""
    name: str | None = None
    """Without effect, like the next two."""
    description: str | None = None
    strict: bool | None = None


class TextOptions(RequestBody):
    """What the text looks like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(RequestBody):
    """Passes where it changes nothing."""

    effort: None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(RequestBody):
    """How a stream is framed."""

    include_obfuscation: bool | None = None


class ResponsesRequest(RequestBody):
    """POST /v1/responses."""

    model: str | None = None
    """Name of the served model; absent means that one."""
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    """A text of the user, or items: messages, calls of tools, their results, reasoning."""
    instructions: str | None = None
    """What the model is told first. Those of the previous response do not count."""
    previous_response_id: _Id | None = None
    """Go on from that response, which must have been stored."""
    store: bool | None = None
    """Keep the response for retrieval and to be gone on from. Default true."""
    max_output_tokens: PositiveInt | None = None
    """Output tokens, reasoning included. Default: what fits the model's length."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Default 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Default 1: keep all."""
    tools: list[FunctionTool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    """As for chat."""
    parallel_tool_calls: bool | None = None
    """Give more than one call. Default true."""
    text: TextOptions | None = None
    """Its `format` is `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "schema": ...}`."""
    stream: bool | None = None
    """Send server-sent events. Default false."""
    stream_options: ResponseStreamOptions | None = None
    """Passes without effect."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds, as for chat."""
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """Comes back with the response."""
    reasoning: ReasoningOptions | None = None
    """Passes with nulls only."""
    include: list[Literal["message.output_text.logprobs"]] | None = None
    """`["message.output_text.logprobs"]`: give log-probabilities of the text's tokens. Nothing else is offered."""
    truncation: Literal["disabled"] | None = None
    """An input that does not fit is refused."""
    background: Literal[False] | None = None
    """Not offered."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Most likely tokens at each place; above 0 it needs `include`."""
    max_tool_calls: None = None
    """Not offered."""
    prompt_cache_key: str | None = None
    """Passes without effect, like the next three."""
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.include)


CHAT_PARAMS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    ".function.": ".",
}
"""Fields that are called otherwise as fields of a chat request."""


def input_items(request: ResponsesRequest) -> list[InputItem]:
    """The input as items."""
    if isinstance(request.input, str):
        return [MessageItem(type="message", role="user", content=request.input)]
    return list(request.input)


def chat_fields(request: ResponsesRequest, items: Sequence[InputItem]) -> dict[str, Any]:
    """A request that goes on from these items, as the fields of a chat request. Raises FieldError."""
    if request.top_logprobs and not request.wants_logprobs:
        message = "top_logprobs: is only allowed where include has message.output_text.logprobs"
        raise FieldError("top_logprobs", message, "invalid_value")
    choice = request.tool_choice
    if isinstance(choice, NamedFunctionTool):
        tool_choice: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        tool_choice = choice
    return {
        "model": request.model,
        "messages": _messages(request.instructions, items),
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "timeout": request.timeout,
        "stream": request.stream,
        "tools": [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in request.tools or []
        ],
        "tool_choice": tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request.text),
        "logprobs": request.wants_logprobs,
        "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
    }


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    form = text.format if text is not None else None
    if form is None:
        return None
    if form.type == "json_schema" and form.json_schema is None:
        raise FieldError("text.format.schema", "text.format.schema: is missing", "missing_required_parameter")
    schema = {"json_schema": {"schema": form.json_schema}} if form.json_schema is not None else {}
    return {"type": form.type, **schema}


def _messages(instructions: str | None, items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """What the model wrote between two messages of others is one message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    answer: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, FunctionCallOutputItem):
            answer = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            answer = None
            messages.append({"role": item.role, "content": _text(item.content)})
            continue
        if answer is None or (isinstance(item, MessageItem) and answer["content"]):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        if isinstance(item, MessageItem):
            answer["content"] = _text(item.content)
        elif isinstance(item, ReasoningItem):
            answer["reasoning_content"] = "\n".join(part.text for part in item.content or item.summary)
        else:
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            answer.setdefault("tool_calls", []).append(call)
    return messages


def _text(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
