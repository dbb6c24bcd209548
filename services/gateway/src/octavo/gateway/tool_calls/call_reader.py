"""Reads one call of a tool, character by character, and says what of it is certain."""

from __future__ import annotations

import json
from collections.abc import Set

from octavo.gateway.json_scanner import WHITESPACE, JsonScanner, Place

_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class ObjectReader:
    """A JSON object, such as the arguments of a call."""

    __slots__ = ("_scanner", "_taken", "_text")

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._text: list[str] = []
        self._taken = 0

    def feed(self, char: str) -> bool:
        """Go on by one character. False if the text is no JSON object with it."""
        if not self._text and char != "{":
            return False
        if not self._scanner.feed(char):
            return False
        self._text.append(char)
        return True

    @property
    def is_complete(self) -> bool:
        return self._scanner.place is Place.END

    def take(self) -> str:
        """What came since the last time."""
        new = "".join(self._text[self._taken :])
        self._taken = len(self._text)
        return new


class CallReader:
    """A call written as `{"name": ..., "arguments": {...}}`; some models write `parameters` for `arguments`.

    The call has begun as soon as its name is known to be one of the tools' and its arguments have begun to come. If it
    breaks off before that, it was no call.
    """

    __slots__ = ("_arguments", "_key", "_names", "_scanner", "_taken", "_value", "name")

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._scanner = JsonScanner()
        self._key = ""
        self._value: list[str] | None = None
        """The key or the value of the outermost object that is being read."""
        self._arguments: list[str] | None = None
        self._taken = 0
        self.name: str | None = None

    @property
    def is_begun(self) -> bool:
        return self.name is not None and (self._arguments is not None or self.is_complete)

    @property
    def is_complete(self) -> bool:
        return self._scanner.place is Place.END

    def take_arguments(self) -> str:
        """What came of the arguments since the last time. Only of a call that has begun."""
        if self._arguments is None:
            self._arguments = list("{}")
        new = "".join(self._arguments[self._taken :])
        self._taken = len(self._arguments)
        return new

    def feed(self, char: str) -> bool:
        """Go on by one character. False if this is no call with it."""
        scanner = self._scanner
        place, depth = scanner.place, scanner.depth
        if depth == 0 and char in WHITESPACE:
            return True
        if (depth == 0 and char != "{") or not scanner.feed(char):
            return False
        if depth == 0:
            return True
        is_first = depth == 1 and place in (Place.KEY, Place.VALUE) and char not in WHITESPACE
        if is_first and scanner.depth and not self._begin(place, char):
            return False
        is_over = place is Place.NUMBER and depth == 1 and scanner.place is not Place.NUMBER
        if self._value is not None and not is_over:
            self._value.append(char)
        if self._value is not None and scanner.depth <= 1 and scanner.place in _AFTER_ENTRY:
            return self._end(scanner.place is Place.COLON)
        return not self.is_complete or self.name is not None

    def _begin(self, place: Place, char: str) -> bool:
        """The beginning of a key or a value of the outermost object."""
        self._value = []
        if place is Place.VALUE and self._key in _ARGUMENT_KEYS:
            if self._arguments is not None or char != "{":
                return False
            self._arguments = self._value
        return True

    def _end(self, is_key: bool) -> bool:
        assert self._value is not None
        text, self._value = "".join(self._value), None
        if is_key:
            self._key = text[1:-1]
        elif self._key == "name":
            if self.name is not None or text[0] != '"' or (name := json.loads(text)) not in self._names:
                return False
            self.name = name
        return not self.is_complete or self.name is not None


_AFTER_ENTRY = frozenset({Place.COLON, Place.AFTER, Place.KEY, Place.END})
