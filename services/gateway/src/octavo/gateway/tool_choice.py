"""What a chat request's `tools` and `tool_choice` mean for its prompt, its output and how that is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.gateway.answer_parts import AnswerReader
from octavo.gateway.answer_reading import AnswerReading, ModelAnswers
from octavo.gateway.chat_template import ChatTemplate
from octavo.gateway.config import GatewayConfig
from octavo.gateway.grammars import GrammarSource
from octavo.gateway.http_errors import FieldError
from octavo.gateway.limits import at_most
from octavo.gateway.openai_schema import ChatRequest, Function, NamedTool
from octavo.gateway.tool_calls.base import OfferedTools, new_call_id
from octavo.gateway.tool_calls.forced import ForcedArgumentsReader, ForcedCallsReader

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The outcome."""

    reading: AnswerReading
    for_template: list[dict[str, Any]] = field(default_factory=list)
    """The tools that the model is shown."""
    grammar: GrammarSource | None = None
    """What binds the output to be calls, where they are demanded."""


def tool_use(
    request: ChatRequest, answers: ModelAnswers, template: ChatTemplate | None, config: GatewayConfig
) -> ToolUse:
    """Raises FieldError."""
    functions = _checked_functions(request, config)
    _check_choice(request, functions)
    shows_reasoning = request.include_reasoning is not False
    if not functions or request.tool_choice == "none":
        return ToolUse(AnswerReading(has_reasoning=answers.has_reasoning, shows_reasoning=shows_reasoning))
    if template is None or not template.takes_tools:
        raise FieldError("tools", "tools: this model's chat template takes none", "unsupported_parameter")
    shown = [function.for_template() for function in functions]
    new_id = new_call_id if answers.tools is None else answers.tools.new_id
    offered = OfferedTools(frozenset(function.name for function in functions), new_id)
    is_single_call = request.parallel_tool_calls is False
    if request.tool_choice not in (None, "auto"):
        reader, grammar = _forced(request, functions, offered, is_single_call)
        return ToolUse(AnswerReading(reader), shown, grammar)
    tool_format = answers.tools
    if tool_format is None:
        message = "tools: it is not known how this model calls tools; the setting --tool-call-parser says it"
        raise FieldError("tools", message, "unsupported_parameter")
    reading = AnswerReading(
        tools=lambda: tool_format.reader(offered),
        marks=tool_format.marks,
        is_single_call=is_single_call,
        has_reasoning=answers.has_reasoning,
        shows_reasoning=shows_reasoning,
    )
    return ToolUse(reading, shown)


def _checked_functions(request: ChatRequest, config: GatewayConfig) -> list[Function]:
    functions = [tool.function for tool in request.tools or []]
    at_most("tools", len(functions), config.max_tools, "tools")
    names = [function.name for function in functions]
    for index, name in enumerate(names):
        if name in names[:index]:
            param = f"tools[{index}].function.name"
            raise FieldError(param, f"{param}: there is another tool called {name}", "invalid_value")
    return functions


def _check_choice(request: ChatRequest, functions: list[Function]) -> None:
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not functions:
        raise FieldError("tool_choice", "tool_choice: is only allowed with tools", "invalid_value")
    names = [function.name for function in functions]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise FieldError("tool_choice", f"tool_choice: no tool is called {choice.function.name}", "invalid_value")


def _forced(
    request: ChatRequest, functions: list[Function], offered: OfferedTools, is_single_call: bool
) -> tuple[Callable[[], AnswerReader], GrammarSource]:
    """How the output is read, and its form."""
    choice = request.tool_choice
    arguments = {
        function.name: GrammarSource(f"tools[{index}].function.parameters", "json", _parameters(function))
        for index, function in enumerate(functions)
    }
    if isinstance(choice, NamedTool):
        name = choice.function.name
        demanded = arguments[name]
        grammar = GrammarSource("tool_choice", "json", demanded.value, (demanded,))
        return lambda: ForcedArgumentsReader(offered, name), grammar
    schema = calls_schema(functions, 1 if is_single_call else None)
    return lambda: ForcedCallsReader(offered), GrammarSource("tool_choice", "json", schema, tuple(arguments.values()))


def _parameters(function: Function) -> dict[str, Any]:
    return _ANY_OBJECT if function.parameters is None else function.parameters


def calls_schema(functions: list[Function], max_calls: int | None) -> dict[str, Any]:
    """A list of calls. Each tool's schema is a definition, with its references to itself turned there."""
    limit = {} if max_calls is None else {"maxItems": max_calls}
    definitions, calls = {}, []
    for index, function in enumerate(functions):
        place = f"#/$defs/tool_{index}"
        definitions[f"tool_{index}"] = _with_references_to(place, _parameters(function))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}, "$defs": definitions}


def _with_references_to(place: str, schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_references_to(place, entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_references_to(place, value) for key, value in schema.items()}
    reference = found.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = place + reference[1:]
    return found
