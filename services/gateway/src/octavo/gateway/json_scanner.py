"""Follows one JSON value character by character, and says as soon as a text cannot be one (RFC 8259)."""

from __future__ import annotations

import enum
import re

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?\Z")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
WHITESPACE = " \t\n\r"


class Place(enum.Enum):
    """What the next character belongs to."""

    VALUE = enum.auto()
    """The beginning of a value."""
    KEY = enum.auto()
    """The beginning of a key of an object."""
    COLON = enum.auto()
    AFTER = enum.auto()
    """What follows an entry: a comma, or the end of the container."""
    STRING = enum.auto()
    NUMBER = enum.auto()
    LITERAL = enum.auto()
    END = enum.auto()
    """The value is complete."""


class JsonScanner:
    """Knows where in a JSON value it is."""

    __slots__ = ("_escape", "_is_first", "_is_key", "_open", "_pending", "place")

    def __init__(self) -> None:
        self.place = Place.VALUE
        self._open: list[str] = []
        """Containers that are open, outermost first."""
        self._is_first = False
        """The innermost container was just opened, and may be closed at once."""
        self._is_key = False
        """The string is a key."""
        self._pending = ""
        """The number so far, or what must still come of a literal."""
        self._escape = 0
        """In a string: characters of an escape that must still come; -1 right after a backslash."""

    @property
    def depth(self) -> int:
        """Containers that are open."""
        return len(self._open)

    def feed(self, char: str) -> bool:
        """Go on by one character. False if the text is no JSON value with it; then nothing more may be fed."""
        match self.place:
            case Place.STRING:
                return self._in_string(char)
            case Place.NUMBER:
                if char in _NUMBER_CHARS:
                    self._pending += char
                    return True
                if not _NUMBER.match(self._pending):
                    return False
                self._close_value()
                return self.feed(char)
            case Place.LITERAL:
                is_right = char == self._pending[0]
                self._pending = self._pending[1:]
                if not self._pending:
                    self._close_value()
                return is_right
            case Place.END:
                return char in WHITESPACE
        if char in WHITESPACE:
            return True
        match self.place:
            case Place.VALUE:
                return self._begin_value(char)
            case Place.KEY:
                return self._begin_key(char)
            case Place.COLON:
                self.place = Place.VALUE
                return char == ":"
            case _:
                return self._after(char)

    def _begin_value(self, char: str) -> bool:
        if char == "]" and self._is_first and self._open[-1] == "[":
            return self._after(char)
        self._is_first = False
        if char == '"':
            self.place, self._is_key = Place.STRING, False
        elif char in "{[":
            self._open.append(char)
            self._is_first = True
            self.place = Place.KEY if char == "{" else Place.VALUE
        elif char in _LITERALS:
            self.place, self._pending = Place.LITERAL, _LITERALS[char][1:]
        elif char in "-0123456789":
            self.place, self._pending = Place.NUMBER, char
        else:
            return False
        return True

    def _begin_key(self, char: str) -> bool:
        if char == "}" and self._is_first:
            return self._after(char)
        self._is_first = False
        self.place, self._is_key = Place.STRING, True
        return char == '"'

    def _after(self, char: str) -> bool:
        self._is_first = False
        opened = self._open[-1]
        if char == ",":
            self.place = Place.KEY if opened == "{" else Place.VALUE
            return True
        self._open.pop()
        self._close_value()
        return char == ("}" if opened == "{" else "]")

    def _in_string(self, char: str) -> bool:
        if self._escape == -1:
            self._escape = 4 if char == "u" else 0
            return char in '"\\/bfnrtu'
        if self._escape:
            self._escape -= 1
            return char in _HEX
        if char == "\\":
            self._escape = -1
        elif char == '"':
            if self._is_key:
                self.place = Place.COLON
            else:
                self._close_value()
        return char >= " "

    def _close_value(self) -> None:
        self.place = Place.AFTER if self._open else Place.END
