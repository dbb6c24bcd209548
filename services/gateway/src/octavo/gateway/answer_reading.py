"""How the text of a model's answers is read: chosen once from the model's chat template and the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.gateway.answer_parts import AnswerPart, AnswerReader, CallArguments, CallStart, PlainReader, Reasoning
from octavo.gateway.chat_template import ChatTemplate
from octavo.gateway.config import GatewayConfig
from octavo.gateway.reasoning import END_THINK, ReasoningReader
from octavo.gateway.tool_calls import hermes, llama3, mistral
from octavo.gateway.tool_calls.base import OfferedTools, ToolCallReader, new_call_id
from octavo.gateway.tool_calls.hermes import HermesReader
from octavo.gateway.tool_calls.llama3 import Llama3Reader
from octavo.gateway.tool_calls.mistral import MistralReader


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way in which a model writes calls of tools."""

    reader: Callable[[OfferedTools], ToolCallReader]
    marks: frozenset[str]
    """Tokens that are part of it, which must be seen even where special tokens are left out of the text."""
    new_id: Callable[[], str] = new_call_id


TOOL_FORMATS = {
    "hermes": ToolFormat(HermesReader, HermesReader.marks),
    "llama3_json": ToolFormat(Llama3Reader, Llama3Reader.marks),
    "mistral": ToolFormat(MistralReader, MistralReader.marks, mistral.new_call_id),
}

_SIGNS = {
    mistral.BEGIN: "mistral",
    hermes.BEGIN: "hermes",
    llama3.PYTHON_TAG: "llama3_json",
    '"parameters":': "llama3_json",
}
"""What a chat template has in it if the model writes calls that way; the first that is found counts."""


@dataclass(frozen=True, slots=True)
class ModelAnswers:
    """What the served model writes besides text."""

    tools: ToolFormat | None
    has_reasoning: bool


def model_answers(config: GatewayConfig, template: ChatTemplate | None) -> ModelAnswers:
    """By the settings; where they say `auto`, by what the chat template mentions."""
    source = template.source if template is not None else ""
    name: str = config.tool_call_parser
    if name == "auto":
        takes_tools = template is not None and template.takes_tools
        name = next((format_name for sign, format_name in _SIGNS.items() if takes_tools and sign in source), "none")
    has_reasoning = END_THINK in source if config.reasoning_parser == "auto" else config.reasoning_parser == "think"
    return ModelAnswers(TOOL_FORMATS.get(name), has_reasoning)


@dataclass(frozen=True, slots=True)
class AnswerReading:
    """How the choices of one request are read."""

    tools: Callable[[], AnswerReader] | None = None
    """Makes a reader for calls of tools; None where none can come."""
    marks: frozenset[str] = frozenset()
    """Special tokens that the reader must see."""
    is_single_call: bool = False
    """Calls after the first one are dropped."""
    has_reasoning: bool = False
    is_reasoning_begun: bool = False
    """The prompt ends where the reasoning begins."""
    shows_reasoning: bool = True

    @property
    def is_plain(self) -> bool:
        """There is nothing but text."""
        return self.tools is None and not self.has_reasoning

    def after_prompt(self, is_reasoning_begun: bool) -> AnswerReading:
        return replace(self, is_reasoning_begun=self.has_reasoning and is_reasoning_begun)

    def reader(self) -> AnswerReader:
        """A reader for one choice."""
        reader: AnswerReader = PlainReader() if self.tools is None else self.tools()
        if self.has_reasoning:
            reader = ReasoningReader(reader, is_begun=self.is_reasoning_begun)
        if self.is_single_call or not self.shows_reasoning:
            reader = _Filter(reader, 1 if self.is_single_call else None, self.shows_reasoning)
        return reader


class _Filter:
    """Leaves out reasoning, or calls after the first ones."""

    def __init__(self, reader: AnswerReader, max_calls: int | None, shows_reasoning: bool) -> None:
        self._reader, self._max_calls, self._shows_reasoning = reader, max_calls, shows_reasoning
        self._num_calls = 0

    def feed(self, text: str) -> list[AnswerPart]:
        return self._kept(self._reader.feed(text))

    def end(self) -> list[AnswerPart]:
        return self._kept(self._reader.end())

    def _kept(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        return [part for part in parts if self._keeps(part)]

    def _keeps(self, part: AnswerPart) -> bool:
        if isinstance(part, Reasoning):
            return self._shows_reasoning
        self._num_calls += isinstance(part, CallStart)
        is_call = isinstance(part, CallStart | CallArguments)
        return not is_call or self._max_calls is None or self._num_calls <= self._max_calls
