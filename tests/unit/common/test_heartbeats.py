"""A link whose other end is silent is noticed in bounded time, an idle one lives on, over every carrier (ops-56e)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.common.codecs.generation import GENERATE
from octavo.common.errors import LinkClosedError, OctavoError
from octavo.common.links import Address, Link, connect, heartbeat, listen
from octavo.common.links.channel import CHANNEL_OPTIONS
from octavo.common.messages.generation import Abort
from support.faulty_link import FaultyLink, faulty_link
from support.waiting import eventually

CARRIERS = ["frames", "grpc+unix"]
BEAT_S = 0.05


@dataclass
class End:
    """One end, bound: what came, and how it ended."""

    link: Link[Any, Any]
    received: list[Any] = field(default_factory=list)
    ends: list[OctavoError | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link.bind(self.received.append, self.ends.append)


@asynccontextmanager
async def joined_by_proxy(carrier: str, folder: Path) -> AsyncIterator[tuple[End, End, FaultyLink]]:
    """Client's end, server's end, and what lies between them."""
    accepted: list[End] = []
    listener = await listen([Address(carrier, str(folder / "far"))], GENERATE, lambda link: accepted.append(End(link)))
    async with faulty_link(folder / "near", folder / "far") as proxy:
        client = End(await connect(Address(carrier, str(folder / "near")), GENERATE, timeout_s=10))
        client.link.send(Abort(1))
        await eventually(lambda: bool(accepted) and accepted[0].received == [Abort(1)])
        try:
            yield client, accepted[0], proxy
        finally:
            client.link.close()
    await listener.close(0)
    await asyncio.sleep(0.02)


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", BEAT_S)


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_both_ends_of_a_half_open_link_call_the_other_quiet_and_then_give_it_up(
    carrier: str, tmp_path: Path, fast_beats: None
) -> None:
    async with joined_by_proxy(carrier, tmp_path) as (client, server, proxy):
        assert not (client.link.is_quiet or server.link.is_quiet)
        proxy.stall()
        await eventually(lambda: client.link.is_quiet and server.link.is_quiet)
        assert (client.ends, server.ends) == ([], [])
        await eventually(lambda: bool(client.ends and server.ends))
        for [error] in (client.ends, server.ends):
            assert isinstance(error, LinkClosedError) and error.message == "nothing has come for 0.75 s"
        assert client.link.is_closed and server.link.is_closed and not client.link.is_quiet


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_link_that_flows_again_in_time_goes_on(carrier: str, tmp_path: Path, fast_beats: None) -> None:
    async with joined_by_proxy(carrier, tmp_path) as (client, server, proxy):
        proxy.stall()
        await eventually(lambda: client.link.is_quiet and server.link.is_quiet)
        client.link.send(Abort(2))
        proxy.heal()
        await eventually(lambda: server.received == [Abort(1), Abort(2)])
        await eventually(lambda: not (client.link.is_quiet or server.link.is_quiet))
        assert (client.ends, server.ends) == ([], [])


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_balancer_that_cuts_idle_connections_lets_an_idle_link_be(
    carrier: str, tmp_path: Path, fast_beats: None
) -> None:
    """The balancer's limit is 10 heartbeats, as 6 minutes are 360 of them for one that cuts after a minute."""
    async with joined_by_proxy(carrier, tmp_path) as (client, server, proxy):
        proxy.max_idle_s = 10 * BEAT_S
        await asyncio.sleep(25 * BEAT_S)
        client.link.send(Abort(2))
        await eventually(lambda: server.received == [Abort(1), Abort(2)])
        assert (client.ends, server.ends, proxy.num_connections) == ([], [], 1)


async def test_without_heartbeats_that_balancer_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 60.0)
    async with joined_by_proxy("frames", tmp_path) as (client, server, proxy):
        proxy.max_idle_s = 10 * BEAT_S
        client.link.send(Abort(2))  # the proxy reads with the limit from now on
        await eventually(lambda: bool(client.ends and server.ends))


async def test_a_process_that_was_suspended_itself_blames_nobody(tmp_path: Path, fast_beats: None) -> None:
    """The clock has moved on by more than a link may be silent, and what came meanwhile has not been read yet."""
    async with joined_by_proxy("frames", tmp_path) as (client, server, _):
        loop = asyncio.get_running_loop()
        until_then = loop.time() + 1.1 * heartbeat.LOST_BEATS * BEAT_S
        while loop.time() < until_then:
            pass
        assert not (client.link.is_quiet or server.link.is_quiet)
        await asyncio.sleep(3 * BEAT_S)
        assert (client.ends, server.ends) == ([], [])
        assert not (client.link.is_quiet or server.link.is_quiet)


async def test_keepalive_pings_of_an_idle_channel_are_not_punished(tmp_path: Path) -> None:
    """ops-56e: ten calls that wait for long share a channel. gRPC's own defaults cut them off, seen beside ours."""
    async with idle_calls(tmp_path / "theirs", []) as theirs, idle_calls(tmp_path / "ours", CHANNEL_OPTIONS) as ours:
        codes = [await asyncio.wait_for(call.code(), 15) for call in theirs]
        assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
        assert {await call.details() for call in theirs} == {"Too many pings"}
        assert not any(call.done() for call in ours)
    assert {await call.code() for call in ours} == {grpc.StatusCode.OK}


@asynccontextmanager
async def idle_calls(socket: Path, server_options: list[tuple[str, int]]) -> AsyncIterator[list[Any]]:
    """Calls that end with the block. Pings come every second instead of every 10 s."""
    release = asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        await release.wait()
        return request

    server = grpc.aio.server(options=server_options)
    handler = grpc.unary_unary_rpc_method_handler(slow)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("octavo.Test", {"Slow": handler}),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    options = [("grpc.keepalive_time_ms", 1000) if "time_ms" in option[0] else option for option in CHANNEL_OPTIONS]
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
        calls = [channel.unary_unary("/octavo.Test/Slow")(b"x") for _ in range(10)]  # type: ignore[call-arg]
        yield calls
        release.set()
        await asyncio.wait([asyncio.ensure_future(call.code()) for call in calls])
    await server.stop(0)
