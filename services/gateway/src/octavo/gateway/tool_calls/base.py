"""What the readers of all formats share: the state they are in, and how they read a call that is an object."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from octavo.gateway.answer_parts import AnswerPart, CallArguments, CallStart, Content, joined
from octavo.gateway.tool_calls.call_reader import CallReader, ObjectReader


def new_call_id() -> str:
    """As OpenAI's look."""
    return "call_" + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What calls are read for."""

    names: frozenset[str]
    new_id: Callable[[], str] = new_call_id


class ToolCallReader(ABC):
    """A state machine over the text of one choice. A state takes text and returns what it leaves to the next one.

    What looks like a call and breaks off before the call has begun is content, as it was written. Arguments that break
    off end there, and what follows is content.
    """

    def __init__(self, tools: OfferedTools) -> None:
        self._tools = tools
        self._parts: list[AnswerPart] = []
        self._call = CallReader(tools.names)
        self._arguments = ObjectReader()
        self._has_begun = False
        """The present call has been announced."""
        self._raw = ""
        """What was read of the present call while it has not begun."""
        self._state: Callable[[str], str] = self._in_text

    def feed(self, text: str) -> list[AnswerPart]:
        while text:
            text = self._state(text)
        parts, self._parts = self._parts, []
        return joined(parts)

    def end(self) -> list[AnswerPart]:
        self._at_end()
        self._raw = ""
        parts, self._parts = self._parts, []
        return joined(parts)

    def _at_end(self) -> None:
        self._say(self._raw)

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))

    def _announce(self, name: str) -> None:
        self._parts.append(CallStart(self._tools.new_id(), name))
        self._has_begun, self._raw = True, ""

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(CallArguments(text))

    def _expect_call(self, raw: str) -> None:
        """Read a call next; `raw` is what stands before it, should it be none."""
        self._call, self._raw, self._has_begun = CallReader(self._tools.names), raw, False
        self._state = self._in_call

    def _expect_arguments(self) -> None:
        self._arguments = ObjectReader()
        self._state = self._in_arguments

    # States.

    def _in_text(self, text: str) -> str:
        """Text that is no call."""
        self._say(text)
        return ""

    @abstractmethod
    def _after_call(self, text: str) -> str:
        """What follows a call."""

    def _in_call(self, text: str) -> str:
        call = self._call
        for index, char in enumerate(text):
            if not call.feed(char):
                return self._break_off(call.take_arguments() if self._has_begun else "", text[index:])
            if not self._has_begun:
                self._raw += char
                if call.is_begun and call.name is not None:
                    self._announce(call.name)
            if call.is_complete:
                self._argue(call.take_arguments())
                self._state = self._after_call
                return text[index + 1 :]
        if self._has_begun:
            self._argue(call.take_arguments())
        return ""

    def _in_arguments(self, text: str) -> str:
        for index, char in enumerate(text):
            if not self._arguments.feed(char):
                return self._break_off(self._arguments.take(), text[index:])
            if self._arguments.is_complete:
                self._argue(self._arguments.take())
                self._state = self._after_call
                return text[index + 1 :]
        self._argue(self._arguments.take())
        return ""

    def _break_off(self, arguments: str, rest: str) -> str:
        self._argue(arguments)
        self._say(self._raw)
        self._raw = ""
        self._state = self._in_text
        return rest
