"""Looks at a whole pool again and again for one watcher, and tells what has changed since its last look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from octavo.common.messages.kv import PoolCounts
from octavo.kvmanager.pool import Pool

SLICE_SIZE = 1024
"""Blocks looked at before messages are let in again: 0.02 ms if nothing has changed, 1 ms if everything has."""
_TABLES_AT_ONCE = 32
MAX_CHANGES = 8192
"""Blocks in one frame, give or take a slice."""
MAX_SHARE = 0.05
"""Of the process's time that one watcher may cost."""

NOT_PUBLISHED, PARENT_GONE = -2, -3


@dataclass(slots=True)
class BlockChanges:
    """Columns, an entry for each block. See BlockChanges in kvmanager_service.proto."""

    block_ids: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    ref_counts: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    parent_ids: list[int] = field(default_factory=list)
    parent_generations: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TableChange:
    """See TableChange in kvmanager_service.proto."""

    sequence_id: int
    num_kept_blocks: int
    block_ids: list[int]
    num_known_tokens: int
    num_published_blocks: int


@dataclass(slots=True)
class PoolFrame:
    """See PoolFrame in kvmanager_service.proto."""

    pool: Pool
    counts: PoolCounts
    is_first: bool = False
    has_more: bool = False
    blocks: BlockChanges = field(default_factory=BlockChanges)
    tables: list[TableChange] = field(default_factory=list)
    gone_sequence_ids: list[int] = field(default_factory=list)


class PoolWatch:
    """What one watcher of a pool has been told. A new one has been told that all blocks are free and never used."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._num_looks = 0
        self._known: dict[int, list[list[Any]]] = {}
        """First block of a slice |-> states, references, generations and keys there."""
        self._tables: dict[int, tuple[list[int], int, int]] = {}

    def look(self) -> Iterator[PoolFrame | None]:
        """Frames of one look, the last without `has_more`. After each item, None too, messages may be let in."""
        frame = self._new_frame()
        frame.is_first = self._num_looks == 0
        self._num_looks += 1
        for first in range(0, self.pool.blocks.num_blocks, SLICE_SIZE):
            self._look_at_blocks(first, frame.blocks)
            if len(frame.blocks.block_ids) >= MAX_CHANGES:
                frame.has_more = True
                yield frame
                frame = self._new_frame()
            else:
                yield None
        present = dict(self.pool.tables)
        frame.gone_sequence_ids = [sequence_id for sequence_id in self._tables if sequence_id not in present]
        for sequence_id in frame.gone_sequence_ids:
            del self._tables[sequence_id]
        num_blocks = 0
        for place, sequence_id in enumerate(present):
            if change := self._look_at_table(sequence_id):
                frame.tables.append(change)
                num_blocks += len(change.block_ids)
            if num_blocks >= MAX_CHANGES:
                frame.has_more, num_blocks = True, 0
                yield frame
                frame = self._new_frame()
            elif place % _TABLES_AT_ONCE == _TABLES_AT_ONCE - 1:
                yield None
        frame.counts = self.pool.counts()
        yield frame

    def _new_frame(self) -> PoolFrame:
        return PoolFrame(self.pool, self.pool.counts())

    def _look_at_blocks(self, first: int, changes: BlockChanges) -> None:
        blocks = self.pool.blocks
        end = min(first + SLICE_SIZE, blocks.num_blocks)
        columns: list[list[Any]] = [
            blocks.states[first:end],
            blocks.ref_counts[first:end],
            list(blocks.generations[first:end]),
            blocks.keys[first:end],
        ]
        known = self._known.get(first)
        if known == columns:
            return
        if known is None:
            known = [[0] * (end - first), [0] * (end - first), [0] * (end - first), [None] * (end - first)]
        self._known[first] = columns
        for offset, (now, before) in enumerate(zip(zip(*columns, strict=True), zip(*known, strict=True), strict=True)):
            if now == before:
                continue
            block_id = first + offset
            parent_id = NOT_PUBLISHED
            if now[3] is not None:
                parent_id = blocks.published_parent(block_id)
                if parent_id < 0 and blocks.parents[block_id] is not None:
                    parent_id = PARENT_GONE
            changes.block_ids.append(block_id)
            changes.states.append(now[0])
            changes.ref_counts.append(now[1])
            changes.generations.append(now[2])
            changes.parent_ids.append(parent_id)
            changes.parent_generations.append(blocks.generations[parent_id] if parent_id >= 0 else 0)

    def _look_at_table(self, sequence_id: int) -> TableChange | None:
        if sequence_id not in self.pool.tables:
            return None  # it has ended since this look began; the next one tells
        table = self.pool.tables.table(sequence_id)
        now = (table.block_ids, table.chain.num_tokens, table.num_published_blocks)
        known = self._tables.get(sequence_id, ([], -1, -1))
        if known == now:
            return None
        num_known = len(known[0])
        num_kept = num_known if table.block_ids[:num_known] == known[0] else 0
        self._tables[sequence_id] = (list(table.block_ids), *now[1:])
        return TableChange(sequence_id, num_kept, table.block_ids[num_kept:], *now[1:])


async def watch_pool(find_pool: Callable[[], Pool | None], interval_s: float) -> AsyncIterator[PoolFrame]:
    """Frames without end while there is a pool; a pool that replaces another is told from its beginning.

    Looks are at least `interval_s` apart, and further if they would cost more than `MAX_SHARE` of the process's time.
    """
    watch: PoolWatch | None = None
    while (pool := find_pool()) is not None:
        if watch is None or watch.pool is not pool:
            watch = PoolWatch(pool)
        began, cost_s = time.perf_counter(), 0.0
        for frame in watch.look():
            cost_s += time.perf_counter() - began
            if frame is not None:
                yield frame
            await asyncio.sleep(0)
            began = time.perf_counter()
        await asyncio.sleep(max(interval_s, cost_s / MAX_SHARE))
