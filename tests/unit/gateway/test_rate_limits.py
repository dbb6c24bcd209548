"""Limits of tenants, counted in memory and in Redis by the same rules."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway.api_keys import Tenant
from octavo.gateway.rate_limits import Lease, Limiter, MemoryLimiter, Standing, duration_text, limit_headers
from octavo.gateway.redis_rate_limits import CALL_TIMEOUT_S, RedisLimiter
from support.redis_server import RunningRedis, running_redis


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRedis]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def test_a_minute_has_its_requests_and_they_come_back_evenly() -> None:
    clock, tenant = Clock(), Tenant(requests_per_minute=3)
    limiter = MemoryLimiter(clock)
    left = [(await limiter.enter(Lease("a", tenant))).requests for _ in range(3)]
    assert left == [2, 1, 0]
    refused = await limiter.enter(Lease("a", tenant))
    assert (refused.refused_by, refused.retry_after_s) == ("requests", 20.0)
    assert (await limiter.enter(Lease("b", tenant))).refused_by is None
    clock.now_s = 19.99
    assert (await limiter.enter(Lease("a", tenant))).refused_by == "requests"
    clock.now_s = 20.0
    assert (await limiter.enter(Lease("a", tenant))).refused_by is None
    clock.now_s = 1000.0
    assert (await limiter.enter(Lease("a", tenant))).requests == 2


async def test_output_tokens_are_owed_and_keep_the_next_request_out_until_they_are_back() -> None:
    clock, lease = Clock(), Lease("a", Tenant(tokens_per_minute=600))
    limiter = MemoryLimiter(clock)
    await limiter.enter(lease)
    assert (await limiter.charge(lease, 100)).tokens == 500
    await limiter.leave(lease, 800)
    refused = await limiter.enter(Lease("a", lease.tenant))
    assert (refused.refused_by, refused.tokens, refused.retry_after_s) == ("tokens", -300, 30.1)
    clock.now_s = 30.1
    assert (await limiter.enter(Lease("a", lease.tenant))).refused_by is None
    assert (await limiter.charge(lease, 601)).retry_after_s == math.inf
    assert (await limiter.charge(lease, 61)).retry_after_s == pytest.approx(6.0)


@given(
    limits=st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(0, 3)),
    steps=st.lists(st.tuples(st.sampled_from(["enter", "leave", "wait"]), st.integers(0, 40)), max_size=60),
)
def test_no_window_lets_in_more_than_the_burst_and_the_rate(
    limits: tuple[int, int, int], steps: list[tuple[str, int]]
) -> None:
    clock = Clock()
    limiter = MemoryLimiter(clock)
    requests, tokens, concurrent = (limit or None for limit in limits)
    tenant = Tenant(requests_per_minute=requests, tokens_per_minute=tokens, max_concurrent=concurrent)
    open_leases: list[Lease] = []
    entered = charged = 0

    async def run() -> None:
        nonlocal entered, charged
        for step, number in steps:
            if step == "wait":
                clock.now_s += number
            elif step == "leave" and open_leases:
                await limiter.leave(open_leases.pop(), number)
            elif step == "enter":
                lease = Lease("a", tenant)
                if (await limiter.enter(lease)).refused_by is None:
                    entered += 1
                    open_leases.append(lease)
                    charged += number if (await limiter.charge(lease, number)).refused_by is None else 0
            assert requests is None or entered <= requests * (1 + clock.now_s / 60) + 1e-6
            assert tokens is None or charged <= tokens * (1 + clock.now_s / 60) + 1e-6
            assert concurrent is None or len(open_leases) <= concurrent

    asyncio.run(run())


@asynccontextmanager
async def limiters(redis: RunningRedis, number: int = 1) -> AsyncIterator[list[RedisLimiter]]:
    opened = [RedisLimiter(redis.url) for _ in range(number)]
    yield opened
    for limiter in opened:
        await limiter.close()


async def script(limiter: Limiter, name: str) -> list[tuple[str | None, int, int, float]]:
    """What a fixed course of calls answers; levels are rounded, since a real clock runs meanwhile."""
    tenant = Tenant(requests_per_minute=6, tokens_per_minute=60, max_concurrent=2)
    leases = [Lease(name, tenant) for _ in range(12)]

    def told(standing: Standing) -> tuple[str | None, int, int, float]:
        retry_s = standing.retry_after_s
        return (
            standing.refused_by,
            round(standing.requests),
            round(standing.tokens / 5),
            retry_s if math.isinf(retry_s) else round(retry_s / 5),
        )

    answers = [told(await limiter.enter(leases[0])), told(await limiter.enter(leases[1]))]
    answers += [told(await limiter.enter(leases[2])), told(await limiter.charge(leases[0], 20))]
    answers += [told(await limiter.charge(leases[1], 61)), told(await limiter.charge(leases[1], 50))]
    await limiter.leave(leases[0], 10)
    answers.append(told(await limiter.enter(leases[3])))
    await limiter.leave(leases[1], 60)
    await limiter.leave(leases[3], 0)
    answers.append(told(await limiter.enter(leases[4])))
    return answers


async def test_redis_and_memory_answer_alike(redis: RunningRedis) -> None:
    expected = [
        (None, 5, 12, 0),
        (None, 4, 12, 0),
        ("concurrent_requests", 4, 12, 0),
        (None, 4, 8, 0),
        ("tokens", 4, 8, math.inf),
        ("tokens", 4, 8, 2),
        (None, 3, 6, 0),
        ("tokens", 3, -6, 6),
    ]
    assert await script(MemoryLimiter(), "x") == expected
    async with limiters(redis) as [shared]:
        assert await script(shared, "x") == expected


async def test_several_gateways_share_one_limit(redis: RunningRedis) -> None:
    tenant = Tenant(requests_per_minute=10)
    async with limiters(redis, 3) as gateways:
        answers = await asyncio.gather(*(gateways[n % 3].enter(Lease("shared", tenant)) for n in range(40)))
    assert sum(answer.refused_by is None for answer in answers) == 10


async def test_open_requests_of_a_gateway_that_died_do_not_count_for_ever(
    redis: RunningRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.gateway.redis_rate_limits._LEASE_S", 1)
    tenant = Tenant(max_concurrent=1)
    async with limiters(redis, 2) as [dead, living]:
        await dead.enter(Lease("dies", tenant))
        assert (await living.enter(Lease("dies", tenant))).refused_by == "concurrent_requests"
        renewing = asyncio.create_task(living.run())
        await asyncio.sleep(1.1)
        held = Lease("dies", tenant)
        assert (await living.enter(held)).refused_by is None
        await asyncio.sleep(1.3)  # its own gateway says that it is open
        assert (await dead.enter(Lease("dies", tenant))).refused_by == "concurrent_requests"
        await living.leave(held, 0)
        assert (await dead.enter(Lease("dies", tenant))).refused_by is None
        renewing.cancel()


async def test_without_redis_a_gateway_counts_by_itself_and_waits_no_longer_than_it_should(
    redis: RunningRedis,
) -> None:
    tenant = Tenant(requests_per_minute=3, max_concurrent=9)
    async with limiters(redis) as [limiter]:
        before = Lease("away", tenant)
        await limiter.enter(before)
        redis.pause()
        started = time.monotonic()
        answers = [(await limiter.enter(Lease("away", tenant))).refused_by for _ in range(4)]
        elapsed_s = time.monotonic() - started
        redis.resume()
        assert answers == [None, None, None, "requests"]
        assert elapsed_s < CALL_TIMEOUT_S + 1.0
        await limiter.leave(before, 0)
        await asyncio.sleep(1.1)  # Redis counts the first of them too: it was asked, and answered late
        assert (await limiter.enter(Lease("away", tenant))).refused_by is None
        assert (await limiter.enter(Lease("away", tenant))).refused_by == "requests"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0123, "13ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (360, "6m0s"), (3661.25, "1h1m1.25s")],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_headers_name_only_the_limits_that_there_are() -> None:
    tenant = Tenant(requests_per_minute=60, max_concurrent=1)
    assert limit_headers(tenant, Standing(58.5, 0)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "58",
        "x-ratelimit-reset-requests": "1.5s",
    }
    assert limit_headers(Tenant(tokens_per_minute=60), Standing(0, -30))["x-ratelimit-remaining-tokens"] == "0"
