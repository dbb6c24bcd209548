"""Which tokens the text of an answer consists of, where it has other parts as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from octavo.gateway.answer_parts import AnswerPart, AnswerReader, Content
from octavo.gateway.choice_output import Delta, OutputToken


@dataclass(frozen=True, slots=True)
class _Placed:
    """A token, and the characters of the unread text that it gives. Inside a character it gives none."""

    token: OutputToken
    start: int
    end: int

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and (self.start >= start or self.end > start)


class TextTokens:
    """Reads one choice token by token, so that each piece of its text is found in the tokens that completed it.

    Each token is told once, with the first piece of text that has some of it. Tokens of marks, of space that is left
    out, of reasoning and of calls are not told, nor are those that end the answer.
    """

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._text = ""
        """What no piece of text has been found in yet, with the tokens in it that were not told."""
        self._tokens: list[_Placed] = []

    def parts(self, delta: Delta) -> Iterator[tuple[AnswerPart, list[OutputToken]]]:
        """The parts that a delta with listed tokens brings, and the tokens of each that is text."""
        for token, text in _texts(delta):
            if text or not token.is_border:
                self._tokens.append(_Placed(token, len(self._text), len(self._text) + len(text)))
                self._text += text
            for part in self._reader.feed(text):
                yield part, self._found(part)
        if delta.finish_reason is not None:
            for part in self._reader.end():
                yield part, self._found(part)

    def _found(self, part: AnswerPart) -> list[OutputToken]:
        if not isinstance(part, Content):
            return []
        # Before it may stand marks and space that were left out, after it a mark that may have begun.
        start = 0 if self._text.startswith(part.text) else max(self._text.rfind(part.text), 0)
        end = start + len(part.text)
        found = [placed.token for placed in self._tokens if placed.overlaps(start, end)]
        self._tokens = [_Placed(one.token, one.start - end, one.end - end) for one in self._tokens if one.start >= end]
        self._text = self._text[end:]
        return found


def _texts(delta: Delta) -> Iterator[tuple[OutputToken, str]]:
    """Each token with its characters of the delta's text."""
    if not delta.tokens:
        return
    first = delta.tokens[0].text_offset
    bounds = [*(token.text_offset - first for token in delta.tokens), len(delta.text)]
    for token, (start, end) in zip(delta.tokens, pairwise(bounds), strict=True):
        yield token, delta.text[start:end]
