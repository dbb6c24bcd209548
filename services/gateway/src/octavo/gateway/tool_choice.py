"""What a chat request's `tools` and `tool_choice` mean for its prompt and for how its answers are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.gateway.answer_reading import AnswerReading, ModelAnswers
from octavo.gateway.chat_template import ChatTemplate
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError
from octavo.gateway.limits import at_most
from octavo.gateway.openai_schema import ChatRequest, NamedTool
from octavo.gateway.tool_calls.base import OfferedTools


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The outcome."""

    reading: AnswerReading
    for_template: list[dict[str, Any]] = field(default_factory=list)
    """The tools that the model is shown."""


def tool_use(
    request: ChatRequest, answers: ModelAnswers, template: ChatTemplate | None, config: GatewayConfig
) -> ToolUse:
    """Raises FieldError."""
    names = _checked_names(request, config)
    _check_choice(request, names)
    reading = AnswerReading(has_reasoning=answers.has_reasoning, shows_reasoning=request.include_reasoning is not False)
    if not names or request.tool_choice == "none":
        return ToolUse(reading)
    tool_format = answers.tools
    if tool_format is None:
        message = "tools: it is not known how this model calls tools; the setting --tool-call-parser says it"
        raise FieldError("tools", message, "unsupported_parameter")
    if template is None or not template.takes_tools:
        raise FieldError("tools", "tools: this model's chat template takes none", "unsupported_parameter")
    offered = OfferedTools(frozenset(names), tool_format.new_id)
    reading = AnswerReading(
        tools=lambda: tool_format.reader(offered),
        marks=tool_format.marks,
        is_single_call=request.parallel_tool_calls is False,
        has_reasoning=reading.has_reasoning,
        shows_reasoning=reading.shows_reasoning,
    )
    return ToolUse(reading, [tool.function.for_template() for tool in request.tools or []])


def _checked_names(request: ChatRequest, config: GatewayConfig) -> list[str]:
    names = [tool.function.name for tool in request.tools or []]
    at_most("tools", len(names), config.max_tools, "tools")
    for index, name in enumerate(names):
        if name in names[:index]:
            param = f"tools[{index}].function.name"
            raise FieldError(param, f"{param}: there is another tool called {name}", "invalid_value")
    return names


def _check_choice(request: ChatRequest, names: list[str]) -> None:
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise FieldError("tool_choice", "tool_choice: is only allowed with tools", "invalid_value")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise FieldError("tool_choice", f"tool_choice: no tool is called {choice.function.name}", "invalid_value")
    message = "tool_choice: only auto and none are supported; a call cannot be forced without structured output"
    raise FieldError("tool_choice", message, "unsupported_parameter")
