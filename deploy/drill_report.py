"""What the drills share: checks that are timed, may fail, and end up in a table."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException


class CheckFailedError(Exception):
    """What was found instead of what was expected."""


def expect(condition: object, found: str) -> None:
    """Raises CheckFailedError with what was found if the condition does not hold."""
    if not condition:
        raise CheckFailedError(found)


def until(condition: Callable[[], bool], within_s: float, what: str) -> float:
    """Seconds until it held. Raises CheckFailedError if it did not in time; errors of I/O count as not yet."""
    begin = time.monotonic()
    while time.monotonic() - begin < within_s:
        try:
            if condition():
                return time.monotonic() - begin
        except (OSError, ValueError, subprocess.SubprocessError):
            pass
        time.sleep(0.25)
    raise CheckFailedError(f"not within {within_s:g} s: {what}")


class Report:
    """The checks so far, in the order in which they ran, and what came of each."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, bool, str]] = []

    @contextmanager
    def check(self, name: str) -> Iterator[list[str]]:
        """A check: its body appends what it found, and raises CheckFailedError if that is wrong."""
        begin, found, has_passed = time.monotonic(), list[str](), True
        try:
            yield found
        except CheckFailedError as error:
            has_passed, found = False, [str(error)]
        except subprocess.CalledProcessError as error:
            last = (error.stderr or error.stdout or "").strip().splitlines()[-1:]
            has_passed, found = False, [f"{' '.join(error.cmd[:6])}: {last[0] if last else error.returncode}"]
        except subprocess.TimeoutExpired as error:
            has_passed, found = False, [f"{' '.join(error.cmd[:6])}: not within {error.timeout:g} s"]
        except (OSError, HTTPException) as error:
            has_passed, found = False, [f"{type(error).__name__}: {error}"]
        took = time.monotonic() - begin
        self._rows.append((name, took, has_passed, "; ".join(found)))
        print(f"{took:7.1f} s  {'ok' if has_passed else 'FAILED':6}  {name}: {'; '.join(found)}", flush=True)

    @property
    def num_failed(self) -> int:
        return sum(not has_passed for _, _, has_passed, _ in self._rows)

    def table(self) -> str:
        """The rows as Markdown, and how many passed."""
        rows = [
            f"| {name} | {took:.1f} | {'ok' if has_passed else '**failed**'} | {found} |"
            for name, took, has_passed, found in self._rows
        ]
        head = ["| check | s | verdict | found |", "| --- | ---: | --- | --- |"]
        return "\n".join([*head, *rows, "", f"{len(rows) - self.num_failed} of {len(rows)} checks passed"])
