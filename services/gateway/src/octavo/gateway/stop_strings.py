"""Stop strings: owns the state of a match that has begun.

The text ends before the first stop string that is completed, reading one character at a time; of two that are
completed by the same character, the longer one counts. So the outcome does not depend on how the text was cut into
tokens or steps. Of stops that are the beginning of one another, the shortest always wins.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    """A beginning of one or more stop strings."""

    depth: int
    """Characters of it."""
    children: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None
    """The longest proper suffix that is a node too; None at the root."""
    stop: str | None = None
    """The longest stop string that ends here."""


class StopStrings:
    """Stop strings as an automaton (Aho and Corasick), shared by all choices that have the same ones."""

    __slots__ = ("begins", "root")

    def __init__(self, stops: Sequence[str]) -> None:
        self.root = _Node(0)
        begins = {re.escape(stop[:2]) for stop in stops} | {re.escape(stop[0]) + r"\Z" for stop in stops}
        self.begins = re.compile("|".join(sorted(begins)))
        """Finds where one may begin: by two characters, or by one at the end of the text. Most texts have none."""
        for stop in stops:
            node = self.root
            for char in stop:
                node = node.children.setdefault(char, _Node(node.depth + 1))
            node.stop = stop
        self._link_fallbacks()

    def _link_fallbacks(self) -> None:
        queue: deque[_Node] = deque()
        for child in self.root.children.values():
            child.fallback = self.root
            queue.append(child)
        while queue:
            node = queue.popleft()
            for char, child in node.children.items():
                child.fallback = self._step(node.fallback, char)
                child.stop = child.stop or child.fallback.stop
                queue.append(child)

    def _step(self, node: _Node | None, char: str) -> _Node:
        while node is not None:
            if char in node.children:
                return node.children[char]
            node = node.fallback
        return self.root

    def advance(self, node: _Node, char: str) -> _Node:
        """The node of the longest beginning of a stop string that the text ends in, after one more character."""
        return node.children.get(char) or self._step(node.fallback, char)


@functools.lru_cache(maxsize=16)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these; the ones that were asked for last are kept."""
    return StopStrings(stops)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed."""

    stop: str
    end: int
    """Characters of the text that was fed last, up to the end of the match."""


class StopMatcher:
    """Follows the text of one choice."""

    __slots__ = ("_node", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = stops.root

    @property
    def num_held_chars(self) -> int:
        """Characters at the end of the text that may yet turn out to belong to a stop string."""
        return self._node.depth

    def feed(self, text: str, *, counts: bool = True) -> StopMatch | None:
        """Read on. After a match nothing more may be fed. Unless the text `counts`, it completes no stop string."""
        stops, node, position = self._stops, self._node, 0
        while position < len(text):
            if node is stops.root:
                begin = stops.begins.search(text, position)
                if begin is None:
                    break
                position = begin.start()
            node = stops.advance(node, text[position])
            position += 1
            if counts and node.stop is not None:
                self._node = node
                return StopMatch(node.stop, position)
        self._node = node
        return None
