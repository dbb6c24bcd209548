"""What a watcher of a whole pool is told: enough to draw it, at any size, without keeping messages waiting."""

from __future__ import annotations

import asyncio
import random
import time
from array import array

from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.pool_watch import SLICE_SIZE, PoolFrame, PoolWatch, watch_pool
from support.pools import DrivenPool, tokens

FREE, ACTIVE, CACHED = BlockState.FREE, BlockState.ACTIVE, BlockState.CACHED


class Picture:
    """A pool as a watcher draws it from what it is told."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, int, int, int]] = {}
        """block |-> state, references, generation, parent"""
        self.tables: dict[int, list[int]] = {}

    def take(self, frame: PoolFrame) -> None:
        if frame.is_first:
            self.blocks, self.tables = {}, {}
        changed = frame.blocks
        columns = (changed.states, changed.ref_counts, changed.generations, changed.parent_ids)
        self.blocks.update(zip(changed.block_ids, zip(*columns, strict=True), strict=True))
        for table in frame.tables:
            kept = self.tables.get(table.sequence_id, [])[: table.num_kept_blocks]
            assert len(kept) == table.num_kept_blocks
            self.tables[table.sequence_id] = kept + table.block_ids
        for sequence_id in frame.gone_sequence_ids:
            del self.tables[sequence_id]

    def look(self, watch: PoolWatch) -> list[PoolFrame]:
        frames = [frame for frame in watch.look() if frame is not None]
        for frame in frames:
            self.take(frame)
        return frames


def test_the_first_look_tells_what_is_used_and_the_next_ones_only_what_has_changed() -> None:
    driven = DrivenPool(num_blocks=8)
    driven.cache(1, tokens(0, 32))  # blocks 0 and 1
    driven.admit(2, tokens(0, 40))  # hits both, and takes block 2
    watch, picture = PoolWatch(driven.pool), Picture()
    [first] = picture.look(watch)
    assert first.is_first and not first.has_more
    assert picture.blocks == {0: (ACTIVE, 1, 1, -1), 1: (ACTIVE, 1, 1, 0), 2: (ACTIVE, 1, 1, -2)}
    assert picture.tables == {2: [0, 1, 2]}
    assert (first.counts.active, first.counts.free) == (3, 5)

    [nothing] = picture.look(watch)
    assert not (nothing.is_first or nothing.blocks.block_ids or nothing.tables or nothing.gone_sequence_ids)

    driven.admit(3, tokens(0, 33))
    [second] = picture.look(watch)
    assert second.blocks.block_ids == [0, 1, 3]
    assert picture.blocks[1] == (ACTIVE, 2, 1, 0)
    assert picture.tables == {2: [0, 1, 2], 3: [0, 1, 3]}

    driven.release(2)
    [third] = picture.look(watch)
    assert third.gone_sequence_ids == [2]
    assert picture.blocks[2] == (FREE, 0, 1, -2)
    assert picture.tables == {3: [0, 1, 3]}


def test_the_picture_is_the_pool_whatever_happens_between_looks() -> None:
    rng = random.Random(5)
    driven = DrivenPool(num_blocks=60)
    watch, picture = PoolWatch(driven.pool), Picture()
    live: set[int] = set()
    for sequence_id in range(1, 200):
        for ended in [sequence for sequence in live if rng.random() < 0.4]:
            driven.release(ended)
            live.remove(ended)
        prefix = rng.randrange(4)
        prompt = tokens(1000 * prefix, 1000 * prefix + 16 * rng.randrange(1, 4)) + tokens(0, rng.randrange(1, 20))
        if driven.pool.blocks.num_available > 12:
            driven.admit(sequence_id, prompt)
            driven.publish(sequence_id, len(prompt))
            live.add(sequence_id)
        if rng.random() < 0.5:
            picture.look(watch)
    picture.look(watch)
    blocks = driven.pool.blocks
    for block_id in range(60):
        told = picture.blocks.get(block_id, (FREE, 0, 0, -2))
        assert told[:3] == (blocks.states[block_id], blocks.ref_counts[block_id], blocks.generations[block_id])
        assert (told[3] == -2) == (blocks.keys[block_id] is None)
    assert picture.tables == {sequence_id: table.block_ids for sequence_id, table in driven.pool.tables}


def test_a_large_pool_comes_in_parts_and_each_slice_is_short() -> None:
    driven = DrivenPool(num_blocks=100_000)
    blocks = driven.pool.blocks
    blocks.states = [ACTIVE] * 100_000
    blocks.ref_counts = [1] * 100_000
    blocks.generations = array("i", [3]) * 100_000
    watch = PoolWatch(driven.pool)
    parts = [frame for frame in watch.look() if frame is not None]
    assert [frame.has_more for frame in parts] == [True] * (len(parts) - 1) + [False]
    assert [frame.is_first for frame in parts] == [True] + [False] * (len(parts) - 1)
    assert [block for frame in parts for block in frame.blocks.block_ids] == list(range(100_000))
    blocks.states[70_000] = CACHED
    slices = []
    began = time.perf_counter()
    frames = []
    for frame in watch.look():
        slices.append(time.perf_counter() - began)
        frames.append(frame)
        began = time.perf_counter()
    assert [frame.blocks.block_ids for frame in frames if frame is not None] == [[70_000]]
    assert len(slices) >= 100_000 // SLICE_SIZE
    assert sorted(slices)[len(slices) // 2] < 0.002


async def test_a_pool_that_replaces_another_is_told_from_its_beginning() -> None:
    old, new = DrivenPool(num_blocks=4), DrivenPool(num_blocks=6)
    old.admit(1, tokens(0, 20))
    new.admit(7, tokens(0, 20))
    present = [old.pool]
    frames = watch_pool(lambda: present[0], interval_s=0.001)
    async with asyncio.timeout(5):
        assert [table.sequence_id for table in (await anext(frames)).tables] == [1]
        present[0] = new.pool
        frame = await anext(frames)
        while not frame.is_first:
            frame = await anext(frames)
        assert [table.sequence_id for table in frame.tables] == [7]
        assert frame.pool is new.pool
        await frames.aclose()
