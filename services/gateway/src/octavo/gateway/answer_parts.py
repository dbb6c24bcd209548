"""What an answer consists of, in the order in which it is written: reasoning, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins."""

    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that began last: a piece of a JSON object."""

    text: str


AnswerPart = Reasoning | Content | CallStart | CallArguments


class AnswerReader(Protocol):
    """Takes the text of one choice, however it is cut, and says what its parts are.

    The parts, with neighbours of one kind joined, do not depend on where the text was cut.
    """

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are certain after this text."""

    def end(self) -> list[AnswerPart]:
        """What is left when there is no more text."""


class PlainReader:
    """Text is text."""

    def feed(self, text: str) -> list[AnswerPart]:
        return [Content(text)] if text else []

    def end(self) -> list[AnswerPart]:
        return []


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """The same with neighbours of one kind made one."""
    found: list[AnswerPart] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, CallStart) or type(last) is not type(part):
            found.append(part)
        else:
            assert isinstance(last, Reasoning | Content | CallArguments)
            found[-1] = type(last)(last.text + part.text)
    return found
