"""Where the book of keys is kept, and the copy of it that a gateway goes by."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import redis
import redis.asyncio
import structlog
from redis.exceptions import RedisError

from octavo.gateway.api_keys import KeyBook, KeyBookError, KeyIndex
from octavo.gateway.config import GatewayConfig

log = structlog.get_logger()

REDIS_KEY = "octavo:api-keys"
RELOAD_S = 2.0
"""How soon a gateway knows of a key that was added or revoked."""
_TIMEOUT_S = 1.0


class KeySource(Protocol):
    """A place with a book's text."""

    async def text(self) -> str:
        """Raises OSError or RedisError if it cannot be read."""

    async def close(self) -> None: ...


class FixedSource:
    """A text that does not change, of an environment variable."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def text(self) -> str:
        return self._text

    async def close(self) -> None: ...


class FileSource:
    """A YAML file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def text(self) -> str:
        return await asyncio.to_thread(self._path.read_text, "utf-8")

    async def close(self) -> None: ...


class RedisSource:
    """One value in Redis."""

    def __init__(self, url: str) -> None:
        self._redis = redis.asyncio.Redis.from_url(url, socket_timeout=None)

    async def text(self) -> str:
        async with asyncio.timeout(_TIMEOUT_S):
            value = await self._redis.get(REDIS_KEY)
        return value.decode() if isinstance(value, bytes) else value or ""

    async def close(self) -> None:
        await self._redis.aclose()


def key_source(config: GatewayConfig) -> KeySource | None:
    """The source that is set; None if requests are not authenticated."""
    if config.api_keys is not None:
        return FixedSource(config.api_keys.get_secret_value())
    if config.api_keys_file is not None:
        return FileSource(config.api_keys_file)
    return RedisSource(str(config.api_keys_redis)) if config.api_keys_redis is not None else None


class KeyRing:
    """The keys in force: the last book that could be read. Until there is one, `index` is None."""

    def __init__(self, source: KeySource) -> None:
        self._source = source
        self._last_text: str | None = None
        self._problem = ""
        self.index: KeyIndex | None = None

    async def run(self) -> None:
        """Keep it current until cancelled."""
        try:
            while True:
                await self.reload()
                await asyncio.sleep(RELOAD_S)
        finally:
            await self._source.close()

    async def reload(self) -> None:
        """A book that cannot be read, or is wrong, leaves the one before it in force."""
        try:
            text = await self._source.text()
            if text != self._last_text:
                self.index = KeyIndex(KeyBook.parse(text))
                self._last_text = text
                log.info("API keys read", keys=len(self.index.book.keys), tenants=len(self.index.book.tenants))
            self._problem = ""
        except (OSError, RedisError, KeyBookError, UnicodeDecodeError) as error:
            problem = f"{type(error).__name__}: {error}"
            if problem != self._problem:
                log.error("API keys not read", error=problem, in_force=self.index is not None)
            self._problem = problem


def read_file(path: Path) -> KeyBook:
    """Raises KeyBookError and OSError."""
    return KeyBook.parse(path.read_text("utf-8"))


def change_file(path: Path, change: Callable[[KeyBook], KeyBook]) -> None:
    """Replace a file's book, whole or not at all; two at once wait for each other. Raises KeyBookError and OSError."""
    with _locked(path.with_name(path.name + ".lock")):
        changed = change(read_file(path) if path.exists() else KeyBook())
        draft = path.with_name(path.name + ".new")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(changed.text())
        draft.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_redis(url: str) -> KeyBook:
    """Raises KeyBookError and RedisError."""
    with _opened(url) as store:
        return KeyBook.parse(str(store.get(REDIS_KEY) or ""))


def change_redis(url: str, change: Callable[[KeyBook], KeyBook]) -> None:
    """Replace the book in Redis; two at once are applied one after the other. Raises KeyBookError and RedisError."""
    with _opened(url) as store:

        def replace(pipe: redis.client.Pipeline) -> None:
            book = KeyBook.parse(str(pipe.get(REDIS_KEY) or ""))
            pipe.multi()
            pipe.set(REDIS_KEY, change(book).text())

        store.transaction(replace, REDIS_KEY)


def _opened(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, decode_responses=True
    )
