"""Where a running `octavo serve` can be found: one small file for each, which goes when the server does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo.cli.model_cache import cache_root


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Addresses of one running server."""

    pid: int
    url: str
    kvmanager: str
    """gRPC address of the KV manager, of several the first."""
    scheduler: str
    """gRPC address of the scheduler, of several the first."""
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Of several groups: pool |-> gRPC addresses of its KV manager and its scheduler"""


@contextmanager
def registered(server: RunningServer) -> Iterator[None]:
    """While this is open, `running_servers` finds the server."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / f"{server.pid}.json"
    file.write_text(json.dumps(asdict(server)), encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """Servers of this user that are alive, the last one started first. Files of dead ones are removed."""
    found: list[tuple[float, RunningServer]] = []
    for file in _folder().glob("*.json"):
        with suppress(OSError, ValueError, TypeError):
            server = RunningServer(**json.loads(file.read_text(encoding="utf-8")))
            if _is_alive(server.pid):
                found.append((file.stat().st_mtime, server))
            else:
                file.unlink(missing_ok=True)
    return [server for _, server in sorted(found, key=lambda entry: -entry[0])]


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "octavo" if runtime else cache_root() / "run"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
