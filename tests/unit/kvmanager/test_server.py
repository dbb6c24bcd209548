"""Streams of schedulers, over the local transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from octavo.common.messages.kv import (
    Admission,
    DeclaredTable,
    DeclarePool,
    KvManagerRequest,
    KvReply,
    KvRequest,
    OpenPool,
    PoolOpened,
    Release,
    StreamRefused,
    Verdict,
)
from octavo.kvmanager.catalogue import CatalogueFolder
from octavo.kvmanager.pool import PoolSettings
from octavo.kvmanager.server import KvManagerServer
from support.kv_streams import Scheduler

BOOT_EPOCH = 77


def opening(pool_id: str = "group-0", epoch: int = 1, incarnation: int = 1) -> OpenPool:
    return OpenPool(pool_id, epoch, incarnation, num_blocks=8, block_size=16)


def step(message_no: int, sequence_id: int | None = None) -> KvRequest:
    admissions = [] if sequence_id is None else [Admission(sequence_id, tuple(range(20)), computes_itself=True)]
    return KvRequest(message_no, 0, admissions=admissions)


@pytest.fixture
def server() -> KvManagerServer:
    return KvManagerServer(PoolSettings(), BOOT_EPOCH, check_ledger=True)


async def test_a_pool_is_opened_and_each_message_is_answered_in_order(server: KvManagerServer) -> None:
    opened, first, second = await Scheduler(server).send(opening(), step(1, sequence_id=5), step(2))
    assert opened == PoolOpened("group-0", BOOT_EPOCH)
    assert isinstance(first, KvReply) and isinstance(second, KvReply)
    assert (first.message_no, second.message_no) == (1, 2)
    assert first.admitted[0].verdict is Verdict.OK


@pytest.mark.parametrize(
    "messages",
    [
        [step(1)],
        [opening(), step(2)],
        [opening(), KvRequest(1, 0, releases=[Release(9, 0)])],
        [opening(), opening("group-1")],
        [OpenPool("group-0", 1, 1, 0, 16)],
    ],
    ids=["step before opening", "gap", "unknown sequence", "another pool", "no blocks"],
)
async def test_a_broken_contract_ends_its_stream_and_no_other(
    server: KvManagerServer, messages: list[KvManagerRequest]
) -> None:
    bystander = Scheduler(server)
    await bystander.send(opening("group-9"))
    culprit = Scheduler(server)
    *_, refused = await culprit.send(*messages)
    assert isinstance(refused, StreamRefused)
    assert refused.reason in ("PROTOCOL_ERROR", "MESSAGE_GAP")
    assert culprit.is_closed
    [reply] = await bystander.send(step(1))
    assert isinstance(reply, KvReply)


async def test_a_fault_of_the_manager_itself_ends_the_stream(
    server: KvManagerServer, damage: Callable[[KvManagerServer], None]
) -> None:
    scheduler = Scheduler(server)
    await scheduler.send(opening())
    damage(server)
    assert [reply for reply in await scheduler.send(step(1)) if not isinstance(reply, StreamRefused)] == []
    assert scheduler.is_closed


def _lose_a_block(server: KvManagerServer) -> None:
    server.pools[0].blocks.free.pop(0)


def _break_the_pool(server: KvManagerServer) -> None:
    server.pools[0].blocks.quarantine.acknowledged_step = None  # type: ignore[assignment]


@pytest.fixture(params=[_lose_a_block, _break_the_pool], ids=["ledger", "exception"])
def damage(request: pytest.FixtureRequest) -> Callable[[KvManagerServer], None]:
    chosen: Callable[[KvManagerServer], None] = request.param
    return chosen


async def test_a_scheduler_with_a_lower_epoch_is_refused(server: KvManagerServer) -> None:
    current, stale = Scheduler(server), Scheduler(server)
    await current.send(opening(epoch=5))
    assert await stale.send(opening(epoch=4)) == [
        StreamRefused("STALE_EPOCH", "epoch 4 of pool 'group-0'; it has seen 5")
    ]
    assert stale.is_closed
    assert len(await current.send(step(1))) == 1


async def test_a_higher_epoch_takes_the_pool_and_cuts_the_old_scheduler_off(server: KvManagerServer) -> None:
    old, new = Scheduler(server), Scheduler(server)
    await old.send(opening(epoch=5), step(1, sequence_id=3))
    await new.send(opening(epoch=6))
    assert old.replies[-1] == StreamRefused("STALE_EPOCH", "epoch 6 has opened the pool")
    assert old.is_closed
    assert await old.send(step(2)) == []
    [reply] = await new.send(step(1))
    assert isinstance(reply, KvReply)
    assert reply.counts.active == 0


async def test_a_stream_that_has_ended_is_not_refused_when_the_next_one_opens_the_pool(server: KvManagerServer) -> None:
    first, second = Scheduler(server), Scheduler(server)
    await first.send(opening(epoch=5))
    first.link.close()
    with capture_logs() as lines:
        await second.send(opening(epoch=6))
    assert [line["event"] for line in lines] == ["stream ended", "pool opened"]


async def test_the_epoch_is_remembered_after_the_stream_has_ended(server: KvManagerServer) -> None:
    first = Scheduler(server)
    await first.send(opening(epoch=5))
    first.link.close()
    late = Scheduler(server)
    await late.send(opening(epoch=4))
    assert late.is_closed


async def test_a_stale_scheduler_that_a_new_manager_cannot_know_loses_the_pool_to_the_owner() -> None:
    """Without a catalogue a lower epoch may come first. It gets an empty pool of a worker that refuses its plans, and
    the owner of the worker takes the pool and declares what it holds."""
    new = KvManagerServer(PoolSettings(), 2, check_ledger=True)
    stale, owner = Scheduler(new), Scheduler(new)
    assert len(await stale.send(opening(epoch=4, incarnation=1), step(1, sequence_id=3))) == 2
    table = DeclaredTable(9, tuple(range(20)), 20, (0, 1), (1, 1))
    declared = DeclarePool([table], [(5, 1)], launched_step=3, acknowledged_step=3)
    _, reply = await owner.send(opening(epoch=5, incarnation=2), declared, KvRequest(1, 3))
    assert isinstance(reply, KvReply)
    assert (reply.counts.active, reply.counts.granted, reply.counts.free + reply.counts.cached) == (2, 1, 5)
    assert stale.replies[-1] == StreamRefused("STALE_EPOCH", "epoch 5 has opened the pool")
    assert stale.is_closed
    again = Scheduler(new)
    assert [type(reply) for reply in await again.send(opening(epoch=4))] == [StreamRefused]
    assert len(await owner.send(KvRequest(2, 3))) == 1


@pytest.mark.parametrize("incarnation", [1, 2])
async def test_opening_again_gives_a_fresh_pool(server: KvManagerServer, incarnation: int) -> None:
    scheduler = Scheduler(server)
    await scheduler.send(opening(), step(1, sequence_id=3))
    _, reply = await scheduler.send(opening(incarnation=incarnation), step(1, sequence_id=3))
    assert isinstance(reply, KvReply)
    assert reply.counts.active == 2


async def test_pools_are_kept_apart_and_found_by_name(server: KvManagerServer) -> None:
    one, other = Scheduler(server), Scheduler(server)
    await one.send(opening("group-0"), step(1, sequence_id=3))
    assert server.find_pool("") is server.find_pool("group-0") is not None
    await other.send(opening("group-1"), step(1))
    assert server.find_pool("") is None
    assert [len(pool.tables) for pool in server.pools] == [1, 0]
    assert server.find_pool("group-2") is None


def resuming(last_reply_no: int, epoch: int = 1, incarnation: int = 1, boot_epoch: int = BOOT_EPOCH) -> OpenPool:
    return replace(
        opening(epoch=epoch, incarnation=incarnation), resume_boot_epoch=boot_epoch, last_reply_no=last_reply_no
    )


async def test_lost_link_is_resumed_with_the_replies_that_were_lost(server: KvManagerServer) -> None:
    """Reply 2 is lost with the link, and message 3 never arrived."""
    first = Scheduler(server)
    _, _, lost = await first.send(opening(), step(1, sequence_id=5), step(2, sequence_id=6))
    first.link.close()
    second = Scheduler(server)
    opened, again = await second.send(resuming(last_reply_no=1))
    assert opened == PoolOpened("group-0", BOOT_EPOCH, is_resumed=True, last_message_no=2)
    assert again == lost
    [third] = await second.send(step(3))
    assert isinstance(third, KvReply)
    assert third.counts.active == 4


@pytest.mark.parametrize(
    "asked",
    [
        resuming(1, boot_epoch=BOOT_EPOCH - 1),
        resuming(1, epoch=2),
        resuming(1, incarnation=2),
        replace(resuming(1), num_blocks=9),
    ],
)
async def test_pool_that_is_not_the_schedulers_own_is_opened_empty(server: KvManagerServer, asked: OpenPool) -> None:
    await Scheduler(server).send(opening(), step(1, sequence_id=5))
    [opened] = await Scheduler(server).send(asked)
    assert opened == PoolOpened("group-0", BOOT_EPOCH, is_resumed=False, last_message_no=0)


async def test_repeated_message_gets_the_answer_that_it_got_before(server: KvManagerServer) -> None:
    scheduler = Scheduler(server)
    _, first, second = await scheduler.send(opening(), step(1, sequence_id=5), step(2))
    assert await scheduler.send(step(1, sequence_id=5), step(2)) == [first, second]


async def test_stale_scheduler_is_refused_also_by_a_new_manager(tmp_path: Path) -> None:
    old = KvManagerServer(PoolSettings(), 1, catalogues=CatalogueFolder(tmp_path))
    await Scheduler(old).send(opening(epoch=5))
    assert old.catalogues is not None
    old.catalogues.close()
    new = KvManagerServer(PoolSettings(), 2, catalogues=CatalogueFolder(tmp_path))
    stale = Scheduler(new)
    assert [type(reply) for reply in await stale.send(opening(epoch=4))] == [StreamRefused]
    assert stale.is_closed
    assert len(await Scheduler(new).send(opening(epoch=5))) == 1
