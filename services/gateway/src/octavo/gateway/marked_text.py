"""Text up to a mark, such as `</think>`, where the mark may be cut anywhere."""

from __future__ import annotations


class TextBeforeMark:
    """Lets text through until the mark comes; holds back what may be the mark's beginning, and the space before it."""

    __slots__ = ("_held", "_mark", "space")

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._held = ""
        self.space = ""
        """The space that stood before the mark."""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that is certain, and what follows the mark, or None while it has not come.

        The space directly before the mark belongs to neither.
        """
        text = self._held + text
        position = text.find(self._mark)
        if position >= 0:
            before = text[:position].rstrip()
            self._held, self.space = "", text[len(before) : position]
            return before, text[position + len(self._mark) :]
        num_kept = len(text[: len(text) - self._num_begun(text)].rstrip())
        self._held = text[num_kept:]
        return text[:num_kept], None

    def end(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _num_begun(self, text: str) -> int:
        """Characters at the end of the text that are a beginning of the mark."""
        longest = min(len(self._mark) - 1, len(text))
        return next((size for size in range(longest, 0, -1) if text.endswith(self._mark[:size])), 0)
