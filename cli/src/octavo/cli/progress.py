"""What long work tells the person who waits for it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with what is being done, and how far it is (0 to 1), or None where that is not known."""

    def __call__(self, activity: str, fraction: float | None = None) -> None: ...
