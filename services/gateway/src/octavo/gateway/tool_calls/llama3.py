"""`{"name": ..., "parameters": {...}}`, or a call after `<|python_tag|>`, as Llama 3 models write."""

from __future__ import annotations

import ast
import json
import re

from octavo.gateway.tool_calls.base import OfferedTools, ToolCallReader

PYTHON_TAG = "<|python_tag|>"
_PYTHON_CALL = re.compile(r"\s*([\w-]+)\.call\((.*)\)\s*\Z", re.DOTALL)
_MAX_PYTHON_CHARS = 65536


class Llama3Reader(ToolCallReader):
    """Calls stand at the beginning, with `;` between them. After the tag, `name.call(key=value)` is a call as well."""

    marks = frozenset({PYTHON_TAG})

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools)
        self._state = self._at_start

    def _at_start(self, text: str) -> str:
        self._raw += text
        begun = self._raw.lstrip()
        if len(begun) < len(PYTHON_TAG) and PYTHON_TAG.startswith(begun):
            return ""
        raw, self._raw = self._raw, ""
        if begun.startswith(PYTHON_TAG):
            self._raw, self._state = raw[: len(raw) - len(begun)] + PYTHON_TAG, self._after_tag
            return begun.removeprefix(PYTHON_TAG)
        if begun[0] == "{":
            self._expect_call(raw[: len(raw) - len(begun)])
            return begun
        self._state = self._in_text
        return raw

    def _after_tag(self, text: str) -> str:
        stripped = text.lstrip()
        self._raw += text[: len(text) - len(stripped)]
        if not stripped:
            return ""
        if stripped[0] == "{":
            self._expect_call(self._raw)
        else:
            self._state = self._in_python
        return stripped

    def _in_python(self, text: str) -> str:
        self._raw += text
        if len(self._raw) > _MAX_PYTHON_CHARS:
            return self._break_off("", "")
        return ""

    def _after_call(self, text: str) -> str:
        text = text.lstrip()
        if not text:
            return ""
        if text[0] == ";":
            self._expect_call("")
            return text[1:]
        self._state = self._in_text
        return text

    def _at_end(self) -> None:
        if self._state == self._in_python and (call := _python_call(self._raw.partition(PYTHON_TAG)[2])):
            name, arguments = call
            if name in self._tools.names:
                self._announce(name)
                self._argue(arguments)
        super()._at_end()


def _python_call(text: str) -> tuple[str, str] | None:
    """Name, and arguments as JSON, of `name.call(key=literal, ...)`; None if the text is something else."""
    match = _PYTHON_CALL.match(text)
    if match is None:
        return None
    try:
        call = ast.parse(f"f({match[2]})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return match[1], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
