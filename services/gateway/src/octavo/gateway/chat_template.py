"""The model's chat template, rendered in a sandbox. Templates come from the model's folder, never from a request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from octavo.gateway.http_errors import FieldError
from octavo.gateway.template_sandbox import BoundedEnvironment, render_bounded


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`, by which training code marks answers; it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusedByTemplateError(jinja2.TemplateError):
    """The template called `raise_exception`."""


def _raise_exception(message: str) -> None:
    raise _RefusedByTemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How messages are rendered."""

    tools: Sequence[dict[str, Any]] = ()
    """What the model is shown of its tools."""
    adds_generation_prompt: bool = True
    """Write what an answer begins with."""
    continues_final_message: bool = False
    """End in the content of the last message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the template may read besides the messages."""


DEFAULT_OPTIONS = TemplateOptions()

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})
"""Names that a request cannot set among the variables."""


class ChatTemplate:
    """Turns messages into the text of a prompt. Raises jinja2.TemplateError if the source cannot be compiled."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens
        self.source = source
        self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        """It shows tools to the model."""

    def render(self, messages: Sequence[dict[str, Any]], options: TemplateOptions = DEFAULT_OPTIONS) -> str:
        """The prompt, up to where the answer begins. Raises FieldError for messages that the template refuses."""
        variables = {
            **options.variables,
            **self._special_tokens,
            "messages": messages,
            "add_generation_prompt": options.adds_generation_prompt,
            "tools": options.tools or None,
            "documents": None,
        }
        try:
            text = render_bounded(self._template, variables)
            return _up_to_content(text, messages[-1]["content"]) if options.continues_final_message else text
        except Exception as error:  # a template can fail in any way
            raise FieldError(
                "messages", f"messages: the chat template refuses them: {error}", "invalid_value"
            ) from None


def _up_to_content(text: str, content: str) -> str:
    """The text up to the end of the last message's content, which a template may have stripped."""
    stripped = content.strip()
    place = text.rfind(stripped) if stripped else -1
    if place < 0:
        raise ValueError("the last message has no content that could be continued")
    whole = content.lstrip()
    return text[:place] + (whole if text.startswith(whole, place) else stripped)


def load_chat_template(model: Path) -> ChatTemplate | None:
    """The template in chat_template.jinja, else in tokenizer_config.json (of several, the one named default).

    Raises ValueError for a tokenizer_config.json that cannot be read.
    """
    config_file = model / "tokenizer_config.json"
    try:
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{config_file} is no JSON: {error}") from error
    template_file = model / "chat_template.jinja"
    source = template_file.read_text(encoding="utf-8") if template_file.exists() else config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, _special_tokens(config)) if source else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, written as a text or as an object with `content`."""
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens
