"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write."""

from __future__ import annotations

from octavo.gateway.marked_text import TextBeforeMark
from octavo.gateway.tool_calls.base import OfferedTools, ToolCallReader

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(ToolCallReader):
    """Any number of calls, with text around them. A missing end mark is forgiven."""

    marks = frozenset({BEGIN, END})

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools)
        self._before = TextBeforeMark(BEGIN)
        self._skips_space = False
        self._end_mark = ""

    def _in_text(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        certain, rest = self._before.feed(text)
        self._say(certain)
        if rest is None:
            return ""
        self._expect_call(self._before.space + BEGIN)
        return rest

    def _after_call(self, text: str) -> str:
        self._end_mark = (self._end_mark + text).lstrip()
        if len(self._end_mark) < len(END) and END.startswith(self._end_mark):
            return ""
        rest, self._end_mark = self._end_mark.removeprefix(END), ""
        self._skips_space, self._state = True, self._in_text
        return rest

    def _at_end(self) -> None:
        super()._at_end()
        self._say(self._before.end())
