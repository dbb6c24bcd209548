"""Follows the events of a pool for one watcher."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from octavo.common.errors import OverloadedLinkError
from octavo.kvmanager.inspection import stored_blocks
from octavo.kvmanager.pool import Pool
from octavo.kvmanager.pool_events import PoolEvent

BATCH_SIZE = 512
"""Events in one message."""
_POLL_INTERVAL_S = 0.02
"""How late a watcher may hear of an event. It looks for itself, so that nothing is done for it on the step path."""


@dataclass(frozen=True, slots=True)
class Batch:
    """See EventBatch in kvmanager_service.proto."""

    life: int
    last: int
    events: list[PoolEvent]
    is_snapshot: bool = False
    has_more: bool = False


async def follow(find_pool: Callable[[], Pool | None], life: int, after: int) -> AsyncIterator[Batch]:
    """Batches for a watcher that left off at event `after` of the pool's `life`; without end while there is a pool.

    Raises OverloadedLinkError if the next event is gone when the watcher is ready for it.
    """
    while (pool := find_pool()) is not None:
        events = pool.blocks.events
        events.watch()
        try:
            position = after if life == events.life and events.can_replay_after(after) else None
            if position is None:
                position = events.last
                async for batch in _snapshot(pool, position):
                    yield batch
            while find_pool() is pool:
                news = events.after(position, BATCH_SIZE)
                if news is None:
                    raise OverloadedLinkError(f"event {position + 1} is gone: events come faster than they are read")
                if news:
                    position += len(news)
                    yield Batch(events.life, position, news)
                else:
                    await asyncio.sleep(_POLL_INTERVAL_S)
        finally:
            events.unwatch()
        life = 0


async def _snapshot(pool: Pool, last: int) -> AsyncIterator[Batch]:
    """What is stored after event `last`, which was the pool's last one when this was called."""
    life, stored = pool.blocks.events.life, stored_blocks(pool)
    page = list(itertools.islice(stored, BATCH_SIZE))
    while True:
        following = list(itertools.islice(stored, BATCH_SIZE))
        yield Batch(life, last, page, is_snapshot=True, has_more=bool(following))
        if not following:
            return
        page = following
        await asyncio.sleep(0)
