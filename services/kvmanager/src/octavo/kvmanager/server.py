"""Puts pools on links: one stream per scheduler and pool."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from octavo.common.errors import InternalError, LinkClosedError, OctavoError, ProtocolError, StaleEpochError
from octavo.common.links import Link
from octavo.common.messages.kv import KvManagerReply, KvManagerRequest, KvRequest, OpenPool, PoolOpened
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings
from octavo.kvmanager.stats import KvStats

log = structlog.get_logger()

KvLink = Link[KvManagerReply, KvManagerRequest]


@dataclass(slots=True)
class _Lease:
    """The pool of one worker group and the stream that drives it."""

    pool: Pool
    stream: _Stream


class KvManagerServer:
    """The pools of this process, by name. A pool lives until a scheduler opens it anew.

    Not thread-safe: everything runs on the event loop of the links.
    """

    def __init__(self, settings: PoolSettings, boot_epoch: int, check_ledger: bool = False) -> None:
        self.boot_epoch = boot_epoch
        self.check_ledger = check_ledger
        self.stats = KvStats()
        self._settings = settings
        self._leases: dict[str, _Lease] = {}
        self._epochs: dict[str, int] = {}
        """Highest epoch that each pool has seen."""
        self._hashing: list[Pool] = []

    @property
    def pools(self) -> list[Pool]:
        return [lease.pool for lease in self._leases.values()]

    def find_pool(self, pool_id: str) -> Pool | None:
        """The pool of that name; an empty name means the only one."""
        if not pool_id and len(self._leases) == 1:
            [lease] = self._leases.values()
            return lease.pool
        found = self._leases.get(pool_id)
        return found.pool if found else None

    def accept(self, link: KvLink) -> None:
        """Serve a scheduler's stream."""
        stream = _Stream(self, link)
        link.bind(stream.receive, stream.ended)

    def hash_arrivals(self, pool: Pool) -> None:
        """Hash what has arrived in the pool: a slice now and then on the loop, between its messages."""
        if pool.arrivals.has_unhashed and pool not in self._hashing:
            self._hashing.append(pool)
            asyncio.get_running_loop().call_soon(self._hash_slice, pool)

    def _hash_slice(self, pool: Pool) -> None:
        if pool.hash_slice() and pool in self.pools:
            asyncio.get_running_loop().call_soon(self._hash_slice, pool)
        else:
            self._hashing.remove(pool)

    def open_pool(self, opening: OpenPool, stream: _Stream) -> Pool:
        """A fresh pool for this stream. The stream that drove the pool before, if any, is closed.

        Raises StaleEpochError if a scheduler with a higher epoch has opened the pool before.
        """
        highest = self._epochs.get(opening.pool_id, 0)
        if opening.epoch < highest:
            raise StaleEpochError(f"epoch {opening.epoch} of pool {opening.pool_id!r}; it has seen {highest}")
        pool = Pool(opening, self._settings, self.stats)
        replaced = self._leases.get(opening.pool_id)
        self._epochs[opening.pool_id] = opening.epoch
        self._leases[opening.pool_id] = _Lease(pool, stream)
        if replaced is not None and replaced.stream is not stream:
            replaced.stream.close("another stream opened its pool")
        log.info(
            "pool opened",
            pool_id=opening.pool_id,
            epoch=opening.epoch,
            incarnation=opening.incarnation,
            num_blocks=opening.num_blocks,
            block_size=opening.block_size,
        )
        return pool


class _Stream:
    """One scheduler's messages, answered in order. An error ends this stream and no other."""

    def __init__(self, server: KvManagerServer, link: KvLink) -> None:
        self._server = server
        self._link = link
        self._pool: Pool | None = None

    def receive(self, message: KvManagerRequest) -> None:
        try:
            self._link.send(self._answer(message))
            if self._pool is not None:
                self._server.hash_arrivals(self._pool)
        except OctavoError as error:
            log.error("stream refused", pool_id=self._pool_id, reason=error.reason, error=error.message)
            self._link.close()
        except Exception:
            log.exception("stream failed", pool_id=self._pool_id)
            self._link.close()

    def close(self, reason: str) -> None:
        log.warning("stream closed", pool_id=self._pool_id, reason=reason)
        self._link.close()

    def ended(self, error: OctavoError | None) -> None:
        if isinstance(error, LinkClosedError):
            log.warning("stream lost", pool_id=self._pool_id, error=error.message)
        elif error is not None:
            log.error("stream refused", pool_id=self._pool_id, reason=error.reason, error=error.message)
        else:
            log.info("stream ended", pool_id=self._pool_id)

    @property
    def _pool_id(self) -> str | None:
        return self._pool.pool_id if self._pool is not None else None

    def _answer(self, message: KvManagerRequest) -> KvManagerReply:
        if isinstance(message, OpenPool):
            return self._open(message)
        if isinstance(message, KvRequest):
            return self._step(message)
        raise ProtocolError(f"{type(message).__name__} is not a message of this stream")

    def _open(self, opening: OpenPool) -> PoolOpened:
        if self._pool is not None and self._pool.pool_id != opening.pool_id:
            raise ProtocolError(f"the stream of pool {self._pool.pool_id!r} opens pool {opening.pool_id!r}")
        self._pool = self._server.open_pool(opening, self)
        return PoolOpened(opening.pool_id, self._server.boot_epoch)

    def _step(self, request: KvRequest) -> KvManagerReply:
        if self._pool is None:
            raise ProtocolError("a step before the pool was opened")
        reply = self._pool.apply(request)
        if self._server.check_ledger and (found := violations(self._pool)):
            raise InternalError(f"after message {request.message_no}: {'; '.join(found)}")
        return reply
