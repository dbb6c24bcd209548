"""What a model writes whose output is bound to be calls, since the request demands them."""

from __future__ import annotations

from octavo.gateway.tool_calls.base import OfferedTools, ToolCallReader


class ForcedCallsReader(ToolCallReader):
    """A list of `{"name": ..., "arguments": {...}}`."""

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools)
        self._state = self._at_start

    def _at_start(self, text: str) -> str:
        stripped = text.lstrip()
        self._raw += text[: len(text) - len(stripped)]
        if not stripped:
            return ""
        if stripped[0] != "[":
            return self._break_off("", stripped)
        self._expect_call(self._raw + "[")
        return stripped[1:]

    def _after_call(self, text: str) -> str:
        text = text.lstrip()
        if not text:
            return ""
        if text[0] == ",":
            self._expect_call("")
            return text[1:]
        self._state = self._in_text
        return text.removeprefix("]").lstrip()


class ForcedArgumentsReader(ToolCallReader):
    """The arguments of one call of a given tool."""

    def __init__(self, tools: OfferedTools, name: str) -> None:
        super().__init__(tools)
        self._name = name
        self._state = self._at_start

    def _at_start(self, text: str) -> str:
        stripped = text.lstrip()
        self._raw += text[: len(text) - len(stripped)]
        if not stripped:
            return ""
        if stripped[0] != "{":
            return self._break_off("", stripped)
        self._announce(self._name)
        self._expect_arguments()
        return stripped

    def _after_call(self, text: str) -> str:
        self._state = self._in_text
        return text.lstrip()
