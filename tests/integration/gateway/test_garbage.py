"""Requests leave no cycles behind, and those of others are searched for when nothing runs."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from octavo.gateway import garbage
from octavo.gateway.event_writer import EventWriter
from octavo.gateway.generation import Generation
from octavo.gateway.generation_run import GenerationRun
from octavo.gateway.request_account import RequestAccount
from octavo.gateway.request_part import Part
from support.running_gateway import RunningGateway, running_gateway, says
from support.waiting import eventually

OF_A_REQUEST = (Generation, Part, GenerationRun, EventWriter, RequestAccount)
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


async def leave_early(gateway: RunningGateway) -> None:
    body = {"prompt": "hello", "stream": True, "max_tokens": 20}
    async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            return


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
        kept = [["RequestAccount"], []] if keeps_connection else [[]]  # a connection keeps its last request's
        await eventually(lambda: alive() in kept, 2)


@pytest.mark.usefixtures("no_collections")
async def test_nothing_of_a_request_outlives_a_client_that_left() -> None:
    async with running_gateway(says("abcdefghij", pauses_after=3)) as gateway:
        for _ in range(3):
            await leave_early(gateway)
        await eventually(lambda: not alive(), 2)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


async def test_cycles_end_when_nothing_runs_or_many_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "INTERVAL_S", 0.01)
    monkeypatch.setattr(garbage, "NEW_OBJECTS_WHEN_IDLE", 50)
    monkeypatch.setattr(garbage, "NEW_OBJECTS_WHEN_BUSY", 100_000)
    num_open = 1
    collecting = asyncio.create_task(garbage.collect_between_requests(lambda: num_open))
    await asyncio.sleep(0.05)

    def leave_cycles(count: int) -> weakref.ref[Cycle]:
        return [weakref.ref(Cycle()) for _ in range(count)][-1]

    last = leave_cycles(1000)
    await asyncio.sleep(0.1)
    assert last() is not None, "a request is open"
    num_open = 0
    await eventually(lambda: last() is None)

    num_open = 1
    last = leave_cycles(200_000)
    await eventually(lambda: last() is None)

    assert not gc.isenabled()
    collecting.cancel()
    with suppress(asyncio.CancelledError):
        await collecting
    assert gc.isenabled()
    gc.unfreeze()
