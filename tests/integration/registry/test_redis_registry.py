"""The registry in a real Redis: leases, fencing numbers, outages, and a Redis that comes back empty."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.common.registry import LeaseLostError, Member, Membership, RegistryAwayError, Roster
from octavo.common.registry.redis_registry import RedisRegistry
from octavo.common.roles import Role
from support.redis_server import RunningRedis, running_redis
from support.waiting import eventually

POOL = (Role.SCHEDULER, "pool")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningRedis]:
    with running_redis(tmp_path) as server:
        yield server


@contextlib.asynccontextmanager
async def registry_of(server: RunningRedis, timeout_s: float = 2.0) -> AsyncIterator[RedisRegistry]:
    registry = RedisRegistry(server.url, timeout_s)
    yield registry
    await registry.close()


@contextlib.asynccontextmanager
async def running(membership: Membership) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(membership.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def scheduler(name: str) -> Member:
    return Member(name, *POOL, address="frames:///run/s.sock", admin="grpc+unix:///run/s.grpc.sock")


async def test_a_member_is_listed_until_it_expires_or_leaves(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        stays = replace(scheduler("stays"), load={"waiting": 3.0})
        await registry.register(stays, 10.0)
        await registry.register(scheduler("dies"), 0.1)
        await registry.register(scheduler("leaves"), 10.0)
        await registry.deregister(scheduler("leaves"))
        assert {member.member_id for member in await registry.members()} == {"stays", "dies"}
        await asyncio.sleep(0.15)
        assert await registry.members() == [stays]


async def test_one_holds_the_lease_and_the_next_gets_a_higher_epoch(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        first = await registry.take_lease(*POOL, "a", 10.0, 1000)
        assert (first.epoch, first.holder_id) == (1000, "a")
        refused = await registry.take_lease(*POOL, "b", 10.0, 5000)
        assert (refused.epoch, refused.holder_id) == (0, "a")
        await registry.release_lease(*POOL, "b")  # not b's to give
        assert not (await registry.take_lease(*POOL, "b", 10.0, 1)).epoch
        await registry.release_lease(*POOL, "a")
        assert (await registry.take_lease(*POOL, "b", 10.0, 1)).epoch == 1001
        assert not await registry.keep_lease(*POOL, "a", 10.0, 1000)
        other_pool = await registry.take_lease(Role.SCHEDULER, "other", "a", 10.0, 7)
        assert other_pool.epoch == 7


async def test_epochs_used_beyond_the_granted_one_count(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        await registry.take_lease(*POOL, "a", 10.0, 1000)
        assert await registry.keep_lease(*POOL, "a", 0.05, 1017)
        await asyncio.sleep(0.1)
        assert (await registry.take_lease(*POOL, "b", 10.0, 1)).epoch == 1018


async def test_epochs_of_today_are_exact(server: RunningRedis) -> None:
    now_ms = time.time_ns() // 1_000_000
    async with registry_of(server) as registry:
        assert (await registry.take_lease(*POOL, "a", 0.01, now_ms)).epoch == now_ms
        await asyncio.sleep(0.05)
        assert (await registry.take_lease(*POOL, "b", 10.0, now_ms)).epoch == now_ms + 1


async def test_of_many_that_race_exactly_one_wins(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        grants = await asyncio.gather(*(registry.take_lease(*POOL, f"m{i}", 10.0, 50) for i in range(20)))
    winners = [grant for grant in grants if grant.epoch]
    assert len(winners) == 1
    assert {grant.holder_id for grant in grants} == {winners[0].holder_id}


async def test_a_lease_that_expired_is_kept_unless_another_had_it(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        epoch = (await registry.take_lease(*POOL, "a", 0.05, 1)).epoch
        await asyncio.sleep(0.1)
        assert await registry.keep_lease(*POOL, "a", 0.05, epoch)
        await asyncio.sleep(0.1)
        await registry.take_lease(*POOL, "b", 0.05, 1)
        await asyncio.sleep(0.1)
        assert not await registry.keep_lease(*POOL, "a", 10.0, epoch), "b had it and has left; a is stale all the same"


async def test_a_redis_that_comes_back_empty_is_told_the_epoch_again(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        epoch = (await registry.take_lease(*POOL, "a", 10.0, 1000)).epoch
        server.kill()
        server.start()
        assert await registry.keep_lease(*POOL, "a", 0.05, epoch)
        await asyncio.sleep(0.1)
        assert (await registry.take_lease(*POOL, "b", 10.0, 1)).epoch == epoch + 1


async def test_every_call_ends_in_time_while_redis_is_held(server: RunningRedis) -> None:
    async with registry_of(server, timeout_s=0.2) as registry:
        server.pause()
        calls = [
            registry.members,
            lambda: registry.register(scheduler("a"), 1.0),
            lambda: registry.deregister(scheduler("a")),
            lambda: registry.take_lease(*POOL, "a", 1.0, 1),
            lambda: registry.keep_lease(*POOL, "a", 1.0, 1),
            lambda: registry.release_lease(*POOL, "a"),
        ]
        for call in calls:
            began = time.monotonic()
            with pytest.raises(RegistryAwayError):
                await call()
            assert time.monotonic() - began < 5.0
        server.resume()


async def test_whoever_is_cancelled_in_a_call_ends_whenever_that_comes(server: RunningRedis) -> None:
    """Redis's own client lost a cancellation now and then, and a scheduler that was replaced lingered."""

    async def refresh() -> None:
        while True:
            await registry.members()

    async with registry_of(server) as registry:
        for round_no in range(300):
            await registry.members()  # connects again
            task = asyncio.create_task(refresh())
            await asyncio.sleep(round_no % 30 / 10_000)
            task.cancel()
            await asyncio.wait({task}, timeout=10.0)
            assert task.cancelled(), round_no


async def test_a_standby_takes_over_with_a_higher_epoch(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        first, second = (Membership(registry, scheduler(name), 0.6) for name in "ab")
        first_epoch = await first.take_lease()
        standby = asyncio.create_task(second.take_lease())
        async with running(first):
            await eventually(lambda: "which a holds" in second.waits_for)
            await asyncio.sleep(0.8)
            assert not standby.done(), "a renews it"
        assert await asyncio.wait_for(standby, 10.0) > first_epoch
        assert second.waits_for == ""


async def test_whoever_lost_the_lease_stops(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        member = Membership(registry, scheduler("a"), 0.3)
        await member.take_lease()
        await registry.release_lease(*POOL, "a")
        await registry.take_lease(*POOL, "b", 10.0, 1)
        with pytest.raises(LeaseLostError, match="another scheduler has taken the lease for pool 'pool'"):
            await asyncio.wait_for(member.run(), 2.0)


async def test_an_outage_changes_nothing_and_members_come_back_by_themselves(server: RunningRedis) -> None:
    """ops-804: the registry is away, then empty."""
    async with registry_of(server, timeout_s=0.2) as registry:
        members = [
            Membership(registry, scheduler("a"), 0.6),
            Membership(registry, replace(scheduler("w"), role=Role.WORKER), 0.6),
        ]
        epoch = await members[0].take_lease()
        roster = Roster(registry, keep_s=1.0)
        async with running(members[0]) as first, running(members[1]):
            await asyncio.sleep(0.1)
            await roster.refresh()
            assert {member.member_id for member in roster.members} == {"a", "w"}
            server.kill()
            began = time.monotonic()
            while time.monotonic() - began < 1.5:
                await roster.refresh()
                assert {member.member_id for member in roster.members} == {"a", "w"}
                await asyncio.sleep(0.1)
            assert "does not answer" in roster.away_reason
            assert not first.done(), "it holds the lease still, as far as anybody knows"
            server.start()
            await roster.refresh()
            assert {member.member_id for member in roster.members} == {"a", "w"}, "the empty registry voids nothing yet"
            await asyncio.sleep(1.2)
            assert {member.member_id: member.epoch for member in await registry.members()} == {"a": epoch, "w": 0}
        await asyncio.sleep(1.1)
        await roster.refresh()
        assert roster.members == [], "both have left"


REFUSES_WRITES = pytest.mark.parametrize(
    "fault", [RunningRedis.set_full, RunningRedis.set_replica], ids=["full", "a replica"]
)


@REFUSES_WRITES
async def test_a_registry_that_refuses_to_write_ends_nobody_and_gives_no_lease(
    fault: Callable[[RunningRedis, bool], None], server: RunningRedis
) -> None:
    async with registry_of(server) as registry:
        holder, standby = (Membership(registry, scheduler(name), 0.6) for name in "ab")
        epoch = await holder.take_lease()
        async with running(holder) as holding:
            waiting = asyncio.create_task(standby.take_lease())
            await eventually(lambda: "which a holds" in standby.waits_for)
            fault(server, True)
            await eventually(lambda: "the registry does not answer" in standby.waits_for)
            await asyncio.sleep(1.0)
            fault(server, False)  # the lease has expired meanwhile
            await asyncio.sleep(0.5)
            assert not (holding.done() or waiting.done()), "the holder may renew it first"
            assert [(member.member_id, member.epoch) for member in await registry.members()] == [("a", epoch)]
        assert await asyncio.wait_for(waiting, 10.0) > epoch


@REFUSES_WRITES
async def test_nobody_is_forgotten_while_nobody_can_renew(
    fault: Callable[[RunningRedis, bool], None], server: RunningRedis
) -> None:
    async with registry_of(server) as registry:
        roster = Roster(registry, keep_s=0.6)
        names = lambda: {member.member_id for member in roster.members}  # noqa: E731
        async with running(Membership(registry, scheduler("a"), 0.3)):
            await registry.register(scheduler("dies"), 0.3)
            await roster.refresh()
            assert names() == {"a", "dies"}
            fault(server, True)
            began = time.monotonic()
            while time.monotonic() - began < 1.5:
                await roster.refresh()
                await asyncio.sleep(0.1)
            assert (names(), "does not answer" in roster.away_reason) == ({"a", "dies"}, True)
            fault(server, False)
            began = time.monotonic()
            while time.monotonic() - began < 1.5:
                await roster.refresh()
                await asyncio.sleep(0.1)
            assert (names(), roster.away_reason) == ({"a"}, "")


async def test_who_starts_before_the_registry_waits_for_it(server: RunningRedis) -> None:
    server.kill()
    async with registry_of(server, timeout_s=0.2) as registry:
        member, roster = Membership(registry, scheduler("a"), 0.6), Roster(registry, keep_s=1.0)
        await roster.refresh()
        assert (roster.members, "does not answer" in roster.away_reason) == ([], True)
        taking = asyncio.create_task(member.take_lease())
        await eventually(lambda: "does not answer" in member.waits_for)
        server.start()
        assert await asyncio.wait_for(taking, 10.0) > 0
        async with running(member):
            await eventually(lambda: member.waits_for == "")
            await asyncio.sleep(0.1)
            await roster.refresh()
            assert [known.member_id for known in roster.members] == ["a"]


async def test_members_of_another_protocol_are_not_spoken_to(server: RunningRedis) -> None:
    async with registry_of(server) as registry:
        await registry.register(replace(scheduler("new"), protocol=2), 10.0)
        await registry.register(replace(scheduler("old"), epoch=5), 10.0)
        await registry.register(replace(scheduler("older"), epoch=4), 10.0)
        roster = Roster(registry)
        await roster.refresh()
        assert {member.member_id for member in roster.members} == {"old", "older"}
        found = roster.latest(*POOL)
        assert found is not None and found.member_id == "old"
        assert roster.latest(Role.SCHEDULER, "elsewhere") is None
