"""Requests leave no cycles behind, and those of others are searched for when nothing runs."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.gateway import garbage
from octavo.gateway.event_writer import EventWriter
from octavo.gateway.generation import Generation
from octavo.gateway.generation_run import GenerationRun
from octavo.gateway.request_account import RequestAccount
from octavo.gateway.request_part import Part
from support.running_gateway import RunningGateway, running_gateway, says
from support.waiting import eventually

OF_A_REQUEST = (Generation, Part, GenerationRun, EventWriter, RequestAccount, RequestResponseCycle)
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what other tests left does not count
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def alive() -> list[str]:
    return [type(one).__name__ for one in gc.get_objects() if type(one) in OF_A_REQUEST]


async def leave_early(gateway: RunningGateway, **options: Any) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": 20, **options}
    async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            return


def raw_request(path: str, **body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "hello"}, 200),
        ("/v1/completions", {"prompt": "hello", "stream": True}, 200),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True, "logprobs": 1}, 200),
        (
            "/v1/completions",
            {"prompt": "hello", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            200,
        ),
        ("/v1/completions", {"prompt": "hello", "max_tokens": -1}, 400),
        ("/v1/completions", {"prompt": "hello", "model": "unknown"}, 404),
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", {**CHAT, "stream": True}, 200),
        ("/v1/responses", {"input": "hello"}, 200),
        ("/v1/responses", {"input": "hello", "stream": True}, 200),
        ("/v1/messages", {**CHAT, "model": "m", "max_tokens": 8, "stream": True}, 200),
    ],
)
@pytest.mark.parametrize("keeps_connection", [False, True])
@pytest.mark.usefixtures("no_collections")
async def test_nothing_of_a_request_outlives_it(
    path: str, body: dict[str, Any], status: int, keeps_connection: bool
) -> None:
    async with running_gateway(says("ab", "cd")) as gateway:
        for _ in range(3):
            headers = {} if keeps_connection else {"connection": "close"}
            response = await gateway.http.post(path, json=body, headers=headers)
            assert response.status_code == status, response.text
            assert '"error":{' not in response.text or status >= 400
            del response
        kept = {"RequestAccount", "RequestResponseCycle"} if keeps_connection else set()  # a connection's last one
        await eventually(lambda: len(alive()) == len(set(alive())) and set(alive()) <= kept, 2)


@pytest.mark.parametrize(
    ("path", "body", "how"),
    [
        ("/v1/completions", {"prompt": "hello"}, {"fails_after": 2}),
        ("/v1/completions", {"prompt": "hello", "timeout": 0.2}, {"pauses_after": 2}),
        ("/v1/chat/completions", CHAT, {"fails_after": 2}),
        ("/v1/responses", {"input": "hello"}, {"fails_after": 2}),
    ],
)
@pytest.mark.usefixtures("no_collections")
async def test_nothing_outlives_a_stream_that_fails(path: str, body: dict[str, Any], how: dict[str, Any]) -> None:
    async with running_gateway(says("abcdefghij", **how)) as gateway:
        for _ in range(3):
            response = await gateway.http.post(path, json={**body, "stream": True}, headers={"connection": "close"})
            assert '"error":{' in response.text
            del response
        await eventually(lambda: not alive(), 2)


@pytest.mark.parametrize("options", [{}, {"stream_options": {"continuous_usage_stats": True}}])
@pytest.mark.usefixtures("no_collections")
async def test_nothing_of_a_request_outlives_a_client_that_left(options: dict[str, Any]) -> None:
    async with running_gateway(says("abcdefghij", pauses_after=3)) as gateway:
        for _ in range(3):
            await leave_early(gateway, **options)
        await eventually(lambda: not alive(), 2)


@pytest.mark.usefixtures("no_collections")
async def test_nothing_outlives_a_client_that_left_with_requests_behind_its_first() -> None:
    async with running_gateway(says("a", never_starts=True)) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_request("/v1/completions", prompt="first") + raw_request("/v1/completions", prompt="second"))
        await eventually(lambda: gateway.client.num_open_requests == 1)
        writer.close()
        await eventually(lambda: gateway.client.num_open_requests == 0, 2)
        assert len(gateway.scheduler.aborts) == 1
        await eventually(lambda: not alive(), 2)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
async def num_open(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[int]]:
    """Of open requests, while cycles are collected for a gateway that has them."""
    monkeypatch.setattr(garbage, "INTERVAL_S", 0.01)
    monkeypatch.setattr(garbage, "NEW_OBJECTS_WHEN_IDLE", 50)
    monkeypatch.setattr(garbage, "NEW_OBJECTS_WHEN_BUSY", 100_000)
    count = [1]
    collecting = asyncio.create_task(garbage.collect_between_requests(lambda: count[0]))
    await asyncio.sleep(0.05)
    try:
        yield count
        assert not gc.isenabled()
    finally:
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting
        gc.unfreeze()
    assert gc.isenabled()


def leave_cycles(count: int) -> weakref.ref[Cycle]:
    """The last of them."""
    return [weakref.ref(Cycle()) for _ in range(count)][-1]


async def test_cycles_end_when_nothing_runs(num_open: list[int]) -> None:
    last = leave_cycles(1000)
    await asyncio.sleep(0.1)
    assert last() is not None, "a request is open"
    num_open[0] = 0
    await eventually(lambda: last() is None)


async def test_cycles_end_when_many_have_come(num_open: list[int]) -> None:
    last = leave_cycles(200_000)
    await eventually(lambda: last() is None)


async def test_no_burst_is_held_up_before_its_requests_are_open(
    num_open: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_open[0] = 0
    monkeypatch.setattr(garbage, "NEW_OBJECTS_IN_A_BURST", -(10**9))  # as if more came all the time
    last = leave_cycles(1000)
    await asyncio.sleep(0.1)
    assert last() is not None
    monkeypatch.setattr(garbage, "NEW_OBJECTS_IN_A_BURST", 500)
    await eventually(lambda: last() is None)
