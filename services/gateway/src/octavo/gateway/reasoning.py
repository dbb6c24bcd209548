"""Tells reasoning from answer in the text of models that write `<think>...</think>` first."""

from __future__ import annotations

from octavo.gateway.answer_parts import AnswerPart, AnswerReader, Reasoning
from octavo.gateway.marked_text import TextBeforeMark

THINK, END_THINK = "<think>", "</think>"


class ReasoningReader:
    """Reads the reasoning and gives what follows it to `answer`.

    Reasoning begins with `<think>` as the first text of the output, or before it if the prompt ends with that mark. It
    ends with `</think>`, or else with the output. Space around the marks belongs to neither part.
    """

    def __init__(self, answer: AnswerReader, *, is_begun: bool) -> None:
        self._answer = answer
        self._begin: str | None = None if is_begun else ""
        """What came so far, while it may still become `<think>`."""
        self._before_end: TextBeforeMark | None = TextBeforeMark(END_THINK) if is_begun else None
        self._has_text = False
        """Something other than space came of the present part."""

    def feed(self, text: str) -> list[AnswerPart]:
        if self._begin is not None:
            self._begin += text
            begun = self._begin.lstrip()
            if len(begun) < len(THINK) and THINK.startswith(begun):
                return []
            text, self._begin = self._begin, None
            if begun.startswith(THINK):
                text, self._before_end = begun.removeprefix(THINK), TextBeforeMark(END_THINK)
            else:
                self._has_text = True
        if self._before_end is None:
            return self._feed_answer(text)
        thought, rest = self._before_end.feed(self._without_first_space(text))
        parts: list[AnswerPart] = [Reasoning(thought)] if thought else []
        if rest is None:
            return parts
        self._before_end, self._has_text = None, False
        return parts + self._feed_answer(rest)

    def end(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._begin:
            parts = self._answer.feed(self._begin)
        elif self._before_end is not None and (held := self._before_end.end().rstrip()):
            parts = [Reasoning(held)]
        return parts + self._answer.end()

    def _feed_answer(self, text: str) -> list[AnswerPart]:
        return self._answer.feed(self._without_first_space(text))

    def _without_first_space(self, text: str) -> str:
        if not self._has_text:
            text = text.lstrip()
            self._has_text = bool(text)
        return text
