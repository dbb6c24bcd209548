"""`[TOOL_CALLS]` and a list of objects, or `[TOOL_CALLS]name{...}` for each call, as Mistral's models write."""

from __future__ import annotations

import re
import secrets
import string

from octavo.gateway.tool_calls.base import OfferedTools
from octavo.gateway.tool_calls.marked import MarkedCallsReader

BEGIN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?\Z")
_MAX_HEAD_CHARS = 512
_ID_CHARS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse others."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


class MistralReader(MarkedCallsReader):
    """Both ways of writing."""

    begin = BEGIN
    marks = frozenset({BEGIN, "[CALL_ID]", "[ARGS]"})

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools)
        self._is_list = False
        self._head = ""

    def _expect_marked(self, mark: str) -> None:
        self._raw, self._has_begun, self._state = mark, False, self._after_mark

    def _after_mark(self, text: str) -> str:
        stripped = text.lstrip()
        self._raw += text[: len(text) - len(stripped)]
        if not stripped:
            return ""
        self._is_list = stripped[0] == "["
        if self._is_list:
            self._expect_call(self._raw + "[")
            return stripped[1:]
        self._head, self._state = "", self._in_head
        return stripped

    def _in_head(self, text: str) -> str:
        """The name of the tool, up to where its arguments begin."""
        for index, char in enumerate(text):
            if char == "{":
                head = _HEAD.match(self._head)
                if head is None or head[1] not in self._tools.names:
                    return self._break_off("", text[index:])
                self._announce(head[1])
                self._expect_arguments()
                return text[index:]
            if char == "\n" or len(self._head) == _MAX_HEAD_CHARS:
                return self._break_off("", text[index:])
            self._head += char
            self._raw += char
        return ""

    def _after_call(self, text: str) -> str:
        text = text.lstrip()
        if not text:
            return ""
        if self._is_list and text[0] == ",":
            self._expect_call("")
            return text[1:]
        is_end = self._is_list and text[0] == "]"
        self._expect_text()
        return text[1:] if is_end else text
