"""Who may connect to a Unix socket: the file's permissions say so."""

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
