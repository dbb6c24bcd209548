"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write."""

from __future__ import annotations

from octavo.gateway.tool_calls.base import OfferedTools
from octavo.gateway.tool_calls.marked import MarkedCallsReader

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(MarkedCallsReader):
    """Any number of calls, with text around them. A missing end mark is forgiven."""

    begin = BEGIN
    marks = frozenset({BEGIN, END})

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools)
        self._end_mark = ""

    def _expect_marked(self, mark: str) -> None:
        self._expect_call(mark)

    def _after_call(self, text: str) -> str:
        self._end_mark = (self._end_mark + text).lstrip()
        if len(self._end_mark) < len(END) and END.startswith(self._end_mark):
            return ""
        rest, self._end_mark = self._end_mark.removeprefix(END), ""
        self._expect_text()
        return rest
