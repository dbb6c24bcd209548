"""The folder where converted models are kept, and how one gets there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from octavo.cli.model_errors import ModelCacheError
from octavo.cli.progress import Progress


def cache_root() -> Path:
    """`$OCTAVO_CACHE`, else `$XDG_CACHE_HOME/octavo`, else `~/.cache/octavo`."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "octavo"


def cached_folder(name: str, fill: Callable[[Path], None], progress: Progress) -> Path:
    """The folder `models/name` of the cache; if there is none, `fill` makes its content.

    The folder appears under its name by a rename, after `fill` has returned, so it is always whole. Of several
    processes that want the same one, one fills and the others wait for it. Raises ModelCacheError.
    """
    folder = cache_root() / "models" / name
    try:
        if not folder.is_dir():
            _fill_once(folder, fill, progress)
    except OSError as error:
        raise ModelCacheError(
            f"the model could not be put into {folder.parent}: {error}. Set OCTAVO_CACHE to a folder that can be "
            "written and has room for it"
        ) from error
    return folder


def _fill_once(folder: Path, fill: Callable[[Path], None], progress: Progress) -> None:
    name = folder.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        _wait_for(lock.fileno(), name, progress)
        if folder.is_dir():
            return
        partial = folder.parent / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: we hold the lock
        partial.mkdir()
        try:
            fill(partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _wait_for(lock: int, name: str, progress: Progress) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        progress(f"waiting for another process that prepares {name}")
        fcntl.flock(lock, fcntl.LOCK_EX)
