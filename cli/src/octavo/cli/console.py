"""The terminal: one status line below, everything else above it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.text import Text

_SERVICE_STYLES = {"gateway": "cyan", "scheduler": "magenta", "kvmanager": "green", "worker": "yellow"}


class Screen:
    """Shows what is going on. On something that is not a terminal, each activity is one line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._activity = ""

    @contextmanager
    def status_line(self) -> Iterator[None]:
        """While this is open, `progress` shows at the bottom."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status("") as self._status:
            yield
        self._status = None

    def progress(self, activity: str, fraction: float | None = None) -> None:
        """Say what is being done, and how far it is (0 to 1)."""
        if self._status is not None:
            self._status.update(Text(activity if fraction is None else f"{activity} {fraction:.0%}"))
        elif activity != self._activity:
            self._console.print(Text(activity), soft_wrap=True)
        self._activity = activity

    def say(self, text: str, style: str = "") -> None:
        """Print text as it is, above the status line."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def service_line(self, service: str, line: str) -> None:
        """Print a line that a service wrote, behind its name."""
        prefix = Text(f"{service:>9} | ", style=_SERVICE_STYLES.get(service, ""))
        self._console.print(prefix + Text.from_ansi(line), soft_wrap=True)
