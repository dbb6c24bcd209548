"""Files of Unix sockets: who may connect, as their permissions say, and whose they are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def for_this_user() -> Iterator[None]:
    """Files made meanwhile, by whatever thread, are closed to other users. Not to be held over an await."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class SocketFile:
    """The file of a socket that was bound at `path` just now."""

    def __init__(self, path: str) -> None:
        self._path, self._identity = path, _identity(path)

    def remove(self) -> None:
        """Remove it, unless a successor has put its own in its place: whoever hung for long may close late."""
        with contextlib.suppress(FileNotFoundError):
            if _identity(self._path) == self._identity:
                os.unlink(self._path)


def _identity(path: str) -> tuple[int, int]:
    """A number may be given out again at once, a time is not."""
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns
