"""The registry by its address."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from octavo.common.registry.registry import Registry
from octavo.common.registry.static import StaticRegistry

_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_FILE_SCHEME = "file://"


def _check(url: str) -> str:
    if not url.startswith((*_REDIS_SCHEMES, _FILE_SCHEME)):
        raise ValueError(f"{url!r} begins with none of {', '.join((*_REDIS_SCHEMES, _FILE_SCHEME))}")
    return url


RegistrySetting = Annotated[str, AfterValidator(_check)]
"""`redis://HOST:PORT/DB`, `rediss://...`, `unix://PATH` of a Redis, or `file://PATH` of a list of members."""


def open_registry(url: str) -> Registry:
    """Raises OSError and ProtocolError if it is a file that cannot be read."""
    if url.startswith(_FILE_SCHEME):
        return StaticRegistry.from_file(Path(url.removeprefix(_FILE_SCHEME)))
    from octavo.common.registry.redis_registry import RedisRegistry

    return RedisRegistry(url)
