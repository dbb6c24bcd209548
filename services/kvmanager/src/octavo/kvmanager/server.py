"""Puts pools on links: one stream per scheduler and pool."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import structlog

from octavo.common.errors import InternalError, LinkClosedError, OctavoError, ProtocolError, StaleEpochError
from octavo.common.links import Link
from octavo.common.messages.kv import (
    DeclarePool,
    KvManagerReply,
    KvManagerRequest,
    KvRequest,
    OpenPool,
    PoolOpened,
    StreamRefused,
)
from octavo.kvmanager.catalogue import Catalogue, CatalogueFolder
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings
from octavo.kvmanager.replies import ReplyLog
from octavo.kvmanager.stats import KvStats

log = structlog.get_logger()

_LIFE_BITS = 16
"""Lives of pools are numbered within a boot; boots may follow one another closely."""

KvLink = Link[KvManagerReply, KvManagerRequest]


@dataclass(slots=True)
class _Lease:
    """The pool of one worker group and the stream that drives it, or drove it last."""

    opening: OpenPool
    pool: Pool
    stream: _Stream
    replies: ReplyLog = field(default_factory=ReplyLog)
    is_sound: bool = True
    """False once a message has failed: the pool's books may not be what they should."""

    def can_resume(self, opening: OpenPool) -> bool:
        """Whether the opening is the same scheduler's, for the same life of the same memory."""
        is_same = opening.epoch == self.opening.epoch and self.is_of_same_life(opening)
        return is_same and self.replies.after(opening.last_reply_no) is not None

    def knows_contents(self, opening: OpenPool) -> bool:
        """Whether blocks hold what the pool knows of them, but for those that the opening or a declaration names.

        A scheduler with a higher epoch that tells no generations has used blocks that this pool knows nothing of.
        """
        is_told = opening.epoch == self.opening.epoch or len(opening.generations) > 0
        return self.is_sound and is_told and self.is_of_same_life(opening)

    def is_of_same_life(self, opening: OpenPool) -> bool:
        """Whether the opening is for the same life of the same memory."""
        own, asked = (
            (known.incarnation, known.num_blocks, known.block_size, known.num_host_blocks, known.kv_format)
            for known in (self.opening, opening)
        )
        return own == asked


class KvManagerServer:
    """The pools of this process, by name. A pool lives until a scheduler opens it anew.

    Not thread-safe: everything runs on the event loop of the links.
    """

    def __init__(
        self,
        settings: PoolSettings,
        boot_epoch: int,
        check_ledger: bool = False,
        catalogues: CatalogueFolder | None = None,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`call_soon` runs a slice of work after what waits already; by default the running event loop does."""
        self.boot_epoch = boot_epoch
        self.check_ledger = check_ledger
        self.stats = KvStats()
        self._settings = settings
        self.catalogues = catalogues
        self._leases: dict[str, _Lease] = {}
        self._num_lives = 0
        self._epochs: dict[str, int] = {}
        """Highest epoch that each pool has seen."""
        self._call_soon = call_soon or (lambda call: asyncio.get_running_loop().call_soon(call))
        self._hashing: list[Pool] = []

    @property
    def hash_algorithm(self) -> str:
        """What names blocks, in all pools."""
        return self._settings.hash_algorithm

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
            self._call_soon(partial(self._hash_slice, pool))

    def _hash_slice(self, pool: Pool) -> None:
        if pool.hash_slice() and pool in self.pools:
            self._call_soon(partial(self._hash_slice, pool))
        else:
            self._hashing.remove(pool)

    def open_pool(self, opening: OpenPool, stream: _Stream) -> tuple[_Lease, PoolOpened]:
        """The pool for this stream: as it was, if the scheduler may resume it, else one in which nobody holds a block.

        What was cached in the same life of the memory stays so. The stream that drives the pool, if any, is
        closed. Raises StaleEpochError if a scheduler with a higher epoch has opened the pool before.
        """
        highest = self._highest_epoch(opening.pool_id)
        if opening.epoch < highest:
            raise StaleEpochError(f"epoch {opening.epoch} of pool {opening.pool_id!r}; it has seen {highest}")
        self._epochs[opening.pool_id] = opening.epoch
        lease = self._leases.get(opening.pool_id)
        is_resumed = opening.resume_boot_epoch == self.boot_epoch and lease is not None and lease.can_resume(opening)
        if lease is not None and lease.stream is not stream and not lease.stream.has_ended:
            lease.stream.refuse(StaleEpochError(f"epoch {opening.epoch} has opened the pool"))
        if lease is None or not is_resumed:
            lease = _Lease(opening, self._new_pool(opening, lease), stream)
            self._leases[opening.pool_id] = lease
        lease.stream = stream
        log.info(
            "pool resumed" if is_resumed else "pool opened",
            pool_id=opening.pool_id,
            epoch=opening.epoch,
            incarnation=opening.incarnation,
            num_blocks=opening.num_blocks,
            block_size=opening.block_size,
            num_cached_blocks=len(lease.pool.blocks.cached),
        )
        return lease, PoolOpened(opening.pool_id, self.boot_epoch, is_resumed, lease.pool.last_message_no)

    def _new_pool(self, opening: OpenPool, before: _Lease | None) -> Pool:
        if before is not None and before.knows_contents(opening):
            cached = before.pool.let_go()
            if cached.catalogue is not None:
                cached.catalogue.note_epoch(opening.epoch)
            return Pool(opening, self._settings, self.stats, cached=cached)
        pool = Pool(opening, self._settings, self.stats, self._catalogue(opening))
        self._num_lives += 1
        pool.blocks.events.life = ((self.boot_epoch << _LIFE_BITS) + self._num_lives) % 2**64
        gc.freeze()  # else the collector would look at every block of the pool, for longer than many steps
        return pool

    def _highest_epoch(self, pool_id: str) -> int:
        if pool_id not in self._epochs and self.catalogues is not None:
            self._epochs[pool_id] = self.catalogues.epoch(pool_id)
        return self._epochs.get(pool_id, 0)

    def _catalogue(self, opening: OpenPool) -> Catalogue | None:
        if self.catalogues is None:
            return None
        return self.catalogues.open(opening, self._settings.hasher(opening).root.ljust(32, b"\0"))


class _Stream:
    """One scheduler's messages, answered in order. An error ends this stream and no other."""

    def __init__(self, server: KvManagerServer, link: KvLink) -> None:
        self._server = server
        self._link = link
        self._lease: _Lease | None = None
        self.has_ended = False

    def receive(self, message: KvManagerRequest) -> None:
        try:
            for answer in self._answers(message):
                self._link.send(answer)
            if self._lease is not None:
                self._server.hash_arrivals(self._lease.pool)
                self._lease.pool.write_catalogue()
        except OctavoError as error:
            self._doubt_pool()
            self.refuse(error)
        except Exception:
            self._doubt_pool()
            log.exception("stream failed", pool_id=self._pool_id)
            self._link.close()

    def _doubt_pool(self) -> None:
        if self._lease is not None:
            self._lease.is_sound = False

    def refuse(self, error: OctavoError) -> None:
        """Tell the scheduler why, and end the stream."""
        tell = log.warning if isinstance(error, StaleEpochError) else log.error
        tell("stream refused", pool_id=self._pool_id, reason=error.reason, error=error.message)
        self._link.send(StreamRefused(error.reason, error.message))
        self._link.close()

    def ended(self, error: OctavoError | None) -> None:
        self.has_ended = True
        if isinstance(error, LinkClosedError):
            log.warning("stream lost", pool_id=self._pool_id, error=error.message)
        elif error is not None:
            log.error("stream refused", pool_id=self._pool_id, reason=error.reason, error=error.message)
        else:
            log.info("stream ended", pool_id=self._pool_id)

    @property
    def _pool_id(self) -> str | None:
        return self._lease.pool.pool_id if self._lease is not None else None

    def _answers(self, message: KvManagerRequest) -> Iterable[KvManagerReply]:
        if isinstance(message, OpenPool):
            return self._open(message)
        if self._lease is None:
            raise ProtocolError("a message before the pool was opened")
        return self._apply(self._lease, message)

    def _open(self, opening: OpenPool) -> Iterable[KvManagerReply]:
        if self._lease is not None and self._lease.pool.pool_id != opening.pool_id:
            raise ProtocolError(f"the stream of pool {self._lease.pool.pool_id!r} opens pool {opening.pool_id!r}")
        self._lease, opened = self._server.open_pool(opening, self)
        if not opened.is_resumed:
            return [opened]
        self._lease.replies.acknowledge(opening.last_reply_no)
        return [opened, *(self._lease.replies.after(opening.last_reply_no) or [])]

    def _apply(self, lease: _Lease, message: KvRequest | DeclarePool) -> Iterable[KvManagerReply]:
        if isinstance(message, DeclarePool):
            lease.pool.declare(message)
            reply = None
        elif message.message_no <= lease.pool.last_message_no:
            reply = lease.replies.find(message.message_no)
        else:
            lease.replies.acknowledge(message.last_reply_no)
            reply = lease.pool.apply(message)
            lease.replies.keep(reply)
        if self._server.check_ledger and (found := violations(lease.pool)):
            raise InternalError(f"after {type(message).__name__}: {'; '.join(found)}")
        return [] if reply is None else [reply]
