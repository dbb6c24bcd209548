"""Calls behind a mark, with text around them."""

from __future__ import annotations

from abc import abstractmethod

from octavo.gateway.marked_text import TextBeforeMark
from octavo.gateway.tool_calls.base import OfferedTools, ToolCallReader


class MarkedCallsReader(ToolCallReader):
    """Lets text through up to the mark. Space before the mark, and behind the last call, is no text."""

    begin: str
    """The mark."""

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools)
        self._before = TextBeforeMark(self.begin)
        self._skips_space = False

    @abstractmethod
    def _expect_marked(self, mark: str) -> None:
        """Go on behind the mark, which is given with the space before it."""

    def _expect_text(self) -> None:
        self._skips_space, self._state = True, self._in_text

    def _in_text(self, text: str) -> str:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        certain, rest = self._before.feed(text)
        self._say(certain)
        if rest is None:
            return ""
        self._expect_marked(self._before.space + self.begin)
        return rest

    def _at_end(self) -> None:
        super()._at_end()
        self._say(self._before.end())
