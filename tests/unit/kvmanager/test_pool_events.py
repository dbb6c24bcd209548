"""The ordered record of what a pool stores and drops."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from octavo.common.errors import OverloadedLinkError
from octavo.common.messages.kv import Admission, Release
from octavo.kvmanager.event_stream import Batch, follow
from octavo.kvmanager.flush import FlushScope
from octavo.kvmanager.inspection import stored_blocks
from octavo.kvmanager.pool import Pool
from octavo.kvmanager.pool_events import EventKind, PoolEvent, PoolEvents, Tier
from support.pools import DrivenPool, tokens


def event(block_id: int) -> PoolEvent:
    return PoolEvent(EventKind.STORED, Tier.DEVICE, block_id, bytes([block_id]), b"")


async def take(pool: Pool | None, num_batches: int, life: int = 0, after: int = 0) -> list[Batch]:
    found = []
    async with aclosing(follow(lambda: pool, life, after)) as batches:  # type: ignore[type-var]
        async for batch in batches:
            found.append(batch)
            if len(found) == num_batches:
                return found
    return found


def test_nothing_is_recorded_until_somebody_watches() -> None:
    driven = DrivenPool(num_blocks=8)
    driven.cache(1, tokens(0, 32))
    events = driven.pool.blocks.events
    assert (events.is_recording, events.last) == (False, 0)
    events.watch()
    driven.cache(2, tokens(100, 132))
    found = events.after(1, 10) or []
    assert [e.kind for e in found] == [EventKind.STORED] * 2
    assert [e.block_id for e in found] == [2, 3]


def test_stored_blocks_name_their_parents_and_evicted_ones_their_digest() -> None:
    driven = DrivenPool(num_blocks=4)
    events = driven.pool.blocks.events
    events.watch()
    driven.cache(1, tokens(0, 48))
    first, second, third = events.after(1, 10) or []
    assert (first.parent, second.parent, third.parent) == (b"", first.digest, second.digest)
    driven.cache(2, tokens(100, 132))
    gone = (events.after(4, 10) or [])[0]
    assert (gone.kind, gone.tier, gone.digest) == (EventKind.EVICTED, Tier.DEVICE, third.digest)


def test_what_host_memory_stores_gives_back_and_drops_is_told() -> None:
    driven = DrivenPool(num_blocks=2, num_host_blocks=2)
    driven.cache(1, tokens(0, 32))
    events = driven.pool.blocks.events
    events.watch()
    reply = driven.send(admissions=[Admission(3, tokens(200, 232), computes_itself=True)])
    [sinking] = reply.transfers
    driven.send(finished_transfers=[sinking.transfer_id], releases=[Release(3, 0)])
    gone, stored = (events.after(1, 10) or [])[:2], (events.after(3, 10) or [])
    assert [(e.kind, e.tier) for e in gone] == [(EventKind.EVICTED, Tier.DEVICE)] * 2
    assert [(e.kind, e.tier) for e in stored] == [(EventKind.STORED, Tier.HOST)] * 2
    assert {e.digest for e in gone} == {e.digest for e in stored}
    by_parent = {e.parent: e for e in stored}
    first = by_parent[b""]
    assert by_parent[first.digest].block_id != first.block_id
    snapshot = list(stored_blocks(driven.pool))
    assert sorted(snapshot) == sorted(stored)
    told = events.last
    reply = driven.send(admissions=[Admission(4, tokens(0, 32), computes_itself=True)])
    [restoring] = reply.transfers
    driven.send(finished_transfers=[restoring.transfer_id])
    [restored] = events.after(told, 10) or []
    assert (restored.kind, restored.tier, restored.digest) == (EventKind.RESTORED, Tier.DEVICE, first.digest)
    told = events.last
    driven.pool.flush(FlushScope())
    flushed = events.after(told, 10) or []
    assert {(e.kind, e.tier) for e in flushed} == {(EventKind.FLUSHED, Tier.DEVICE), (EventKind.FLUSHED, Tier.HOST)}
    assert list(stored_blocks(driven.pool)) == []


def test_a_host_block_that_gives_way_is_told_as_evicted() -> None:
    driven = DrivenPool(num_blocks=2, num_host_blocks=1)
    events = driven.pool.blocks.events
    events.watch()
    digests = []
    for sequence_id in range(1, 4):
        admitted = driven.send(
            admissions=[Admission(sequence_id, tokens(100 * sequence_id, 100 * sequence_id + 32), computes_itself=True)]
        )
        driven.publish(sequence_id, 16)
        finished = [transfer.transfer_id for transfer in admitted.transfers]
        driven.send(finished_transfers=finished, releases=[Release(sequence_id, 0)])
    on_host = [e for e in events.after(1, 100) or [] if e.tier is Tier.HOST]
    digests = [e.digest for e in on_host]
    assert [e.kind for e in on_host] == [EventKind.STORED, EventKind.EVICTED, EventKind.STORED]
    assert digests[0] == digests[1] != digests[2]


def test_what_a_watcher_missed_is_replayed_as_long_as_it_is_known() -> None:
    events = PoolEvents(capacity=4)
    events.watch()
    start = events.last
    for block_id in range(3):
        events.record(event(block_id))
    assert events.after(start + 1, 10) == [event(1), event(2)]
    assert events.after(start, 2) == [event(0), event(1)]
    for block_id in range(3, 6):
        events.record(event(block_id))
    assert events.after(start, 10) is None
    assert events.after(start + 2, 10) == [event(2), event(3), event(4), event(5)]
    assert events.after(events.last, 10) == []
    assert events.after(events.last + 1, 10) is None


def test_recording_stops_one_ring_after_the_last_watcher_left() -> None:
    events = PoolEvents(capacity=4)
    events.watch()
    events.record(event(0))
    left_at = events.last
    events.unwatch()
    for block_id in range(1, 4):
        events.record(event(block_id))
    assert events.after(left_at, 10) == [event(1), event(2), event(3)]
    events.record(event(4))
    assert not events.is_recording
    stopped_at = events.last
    events.watch()
    assert not events.can_replay_after(stopped_at), "events may have gone unrecorded"
    assert events.can_replay_after(events.last)


async def test_a_new_watcher_gets_a_snapshot_then_what_happens() -> None:
    driven = DrivenPool(num_blocks=8)
    driven.pool.blocks.events.life = 70
    table = driven.cache(1, tokens(0, 32))
    batches = follow(lambda: driven.pool, life=0, after=0)
    snapshot = await anext(batches)
    assert (snapshot.life, snapshot.is_snapshot, snapshot.has_more) == (70, True, False)
    assert sorted(e.block_id for e in snapshot.events) == sorted(table)
    driven.cache(2, tokens(100, 116))
    live = await anext(batches)
    assert (live.is_snapshot, live.last, len(live.events)) == (False, snapshot.last + 1, 1)


async def test_a_watcher_that_comes_back_goes_on_where_it_was() -> None:
    driven = DrivenPool(num_blocks=8)
    driven.pool.blocks.events.life = 70
    [snapshot] = await take(driven.pool, 1)
    driven.cache(1, tokens(0, 32))
    [missed] = await take(driven.pool, 1, life=70, after=snapshot.last)
    assert (missed.is_snapshot, missed.last, len(missed.events)) == (False, snapshot.last + 2, 2)
    [other_life] = await take(driven.pool, 1, life=69, after=snapshot.last)
    assert other_life.is_snapshot


async def test_a_replaced_pool_starts_with_a_snapshot() -> None:
    old, new = DrivenPool(num_blocks=8), DrivenPool(num_blocks=8)
    old.pool.blocks.events.life, new.pool.blocks.events.life = 70, 71
    new.cache(1, tokens(0, 16))
    current = [old.pool]
    batches = follow(lambda: current[0], life=0, after=0)
    assert (await anext(batches)).life == 70
    current[0] = new.pool
    renewed = await anext(batches)
    assert (renewed.life, renewed.is_snapshot, len(renewed.events)) == (71, True, 1)


async def test_a_watcher_that_is_too_slow_is_cut() -> None:
    driven = DrivenPool(num_blocks=8)
    driven.pool.blocks.events._capacity = 4
    batches = follow(lambda: driven.pool, life=0, after=0)
    await anext(batches)
    for first in range(6):
        driven.cache(first + 1, tokens(100 * first, 100 * first + 16))
    with pytest.raises(OverloadedLinkError, match="faster than they are read"):
        await anext(batches)
    await asyncio.sleep(0)
    assert driven.pool.blocks.events._num_watchers == 0


async def test_a_long_snapshot_comes_in_parts() -> None:
    driven = DrivenPool(num_blocks=1100, block_size=1)
    driven.cache(1, tokens(0, 1050))
    parts = await take(driven.pool, 3)
    assert [(len(part.events), part.has_more) for part in parts] == [(512, True), (512, True), (26, False)]
    assert len({e.digest for part in parts for e in part.events}) == 1050
