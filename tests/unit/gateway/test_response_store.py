"""Stores of responses: what is kept, for how long, and how much of it. Redis is a real one, where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.errors import NotReadyError
from octavo.gateway.redis_response_store import RedisResponseStore
from octavo.gateway.response_store import MemoryResponseStore, ResponseStore
from support.redis_server import running_redis


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


async def check_contract(store: ResponseStore) -> None:
    assert await store.get("a") is None
    await store.put("a", b"one")
    await store.put("b", b"two")
    await store.put("a", b"three")
    assert (await store.get("a"), await store.get("b")) == (b"three", b"two")
    assert await store.delete("a")
    assert not await store.delete("a")
    assert await store.get("a") is None
    await store.put("c", b"x" * 101)
    assert await store.get("c") is None
    await store.close()


async def test_memory_keeps_the_contract() -> None:
    await check_contract(MemoryResponseStore(100, 60))


async def test_redis_keeps_the_contract(redis_url: str) -> None:
    await check_contract(RedisResponseStore(redis_url, 100, 60))


async def test_redis_drops_what_has_expired_and_shares_what_has_not(redis_url: str) -> None:
    short, other = RedisResponseStore(redis_url, 100, 0.2), RedisResponseStore(redis_url, 100, 60)
    await short.put("s", b"one")
    assert await other.get("s") == b"one"
    async with asyncio.timeout(5):
        while await other.get("s") is not None:  # noqa: ASYNC110 (Redis tells nobody)
            await asyncio.sleep(0.05)
    await short.close()
    await other.close()


async def test_redis_that_is_away_is_told_by_a_typed_error() -> None:
    store = RedisResponseStore("redis://127.0.0.1:1/0", 100, 60)
    with pytest.raises(NotReadyError, match="cannot be reached"):
        await store.put("a", b"one")
    with pytest.raises(NotReadyError, match="cannot be reached"):
        await store.get("a")
    await store.close()


async def test_memory_drops_what_has_expired() -> None:
    clock = Clock()
    store = MemoryResponseStore(100, 10, clock)
    await store.put("a", b"one")
    clock.now_s = 9.0
    await store.put("b", b"two")
    clock.now_s = 10.0
    assert (await store.get("a"), await store.get("b")) == (None, b"two")
    assert store.num_bytes == 3


async def test_memory_gives_the_oldest_up_when_there_is_too_much() -> None:
    store = MemoryResponseStore(10, 60)
    for key in ("a", "b", "c"):
        await store.put(key, b"1234")
    assert [await store.get(key) for key in ("a", "b", "c")] == [None, b"1234", b"1234"]
    assert store.num_bytes == 8


@given(steps=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 7), st.integers(0, 4)), max_size=30))
def test_memory_never_holds_more_than_it_may(steps: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        clock = Clock()
        store = MemoryResponseStore(12, 10, clock)
        for key, size, wait_s in steps:
            clock.now_s += wait_s
            await store.put(key, b"x" * size)
            assert await store.get(key) == b"x" * size
            held = [record for name in "abcd" if (record := await store.get(name)) is not None]
            assert store.num_bytes == sum(map(len, held)) <= 12

    asyncio.run(run())
