"""Links behave alike over every carrier: order, closing from either end, early messages, bad bytes, slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from octavo.common.codecs.generation import GENERATE
from octavo.common.errors import OctavoError, OverloadedLinkError, ProtocolError, ProtocolVersionError
from octavo.common.links import Address, Link, Listener, connect, grpc_stream, listen, local_pair, protocol_version
from octavo.common.links.channel import CHANNEL_OPTIONS
from octavo.common.links.protocol_version import SpokenVersions
from octavo.common.messages.generation import Abort, SchedulerStatus
from support.waiting import eventually

CARRIERS = ["frames", "grpc", "grpc+unix", "local"]
SOCKET_CARRIERS = CARRIERS[:-1]


def question(number: int) -> Abort:
    return Abort(number)


def answer(number: int) -> SchedulerStatus:
    return SchedulerStatus(True, str(number), None)


@dataclass
class End:
    """What one bound end has seen."""

    link: Link[Any, Any]
    received: list[Any] = field(default_factory=list)
    ends: list[OctavoError | None] = field(default_factory=list)
    deliveries: list[int] = field(default_factory=list)
    """Messages that had been received after each."""

    def bind(self) -> End:
        self.link.bind(self.received.append, self.ends.append, lambda: self.deliveries.append(len(self.received)))
        return self


class Pair:
    """The two ends of one stream. Only the client's is bound, unless a test binds the other."""

    def __init__(self, client: Link[Any, Any], server: Link[Any, Any], address: Address | None) -> None:
        self.client = End(client)
        self.server = End(server)
        self.address = address


def address_of(carrier: str, tmp_path: Path) -> Address:
    if carrier != "grpc":
        return Address(carrier, str(tmp_path / "socket"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("grpc", f"127.0.0.1:{probe.getsockname()[1]}")


@asynccontextmanager
async def open_pair(carrier: str, tmp_path: Path) -> AsyncIterator[Pair]:
    if carrier == "local":
        client: Link[Any, Any]
        server: Link[Any, Any]
        client, server = local_pair()
        yield Pair(client, server, None)
        return
    accepted: list[Link[Any, Any]] = []
    address = address_of(carrier, tmp_path)
    listener: Listener = await listen([address], GENERATE, accepted.append)
    connected = await connect(address, GENERATE, timeout_s=10)
    await eventually(lambda: len(accepted) == 1)
    yield Pair(connected, accepted[0], address)
    connected.close()
    await listener.close(0.1)
    await asyncio.sleep(0.02)


@pytest.fixture
async def opened(carrier: str, tmp_path: Path) -> AsyncIterator[Pair]:
    async with open_pair(carrier, tmp_path) as pair:
        yield pair


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_messages_arrive_in_order_both_ways(opened: Pair) -> None:
    await exchange(opened)


@pytest.mark.parametrize("carrier", ["frames", "local"])
def test_links_work_on_the_loop_that_the_services_run_on(carrier: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with open_pair(carrier, tmp_path) as pair:
            await exchange(pair)
            pair.server.link.close()
            await eventually(lambda: pair.client.ends == [None])

    uvloop.run(run())


async def exchange(opened: Pair) -> None:
    client, server = opened.client.bind(), opened.server.bind()
    for number in range(500):
        client.link.send(question(number))
        server.link.send(answer(number))
    await eventually(lambda: len(client.received) == len(server.received) == 500)
    assert server.received == [question(number) for number in range(500)]
    assert client.received == [answer(number) for number in range(500)]
    assert client.deliveries[-1] == server.deliveries[-1] == 500


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_early_messages_wait_until_the_link_is_bound(opened: Pair) -> None:
    opened.client.bind().link.send(question(1))
    opened.client.link.send(question(2))
    await asyncio.sleep(0.1)
    server = opened.server.bind()
    assert (server.received, server.deliveries) == ([question(1), question(2)], [2])
    opened.client.link.send(question(3))
    await eventually(lambda: len(server.received) == 3)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("closer", ["client", "server"])
async def test_what_was_sent_before_a_close_is_delivered_and_each_end_hears_of_it_once(
    opened: Pair, closer: str
) -> None:
    client, server = opened.client.bind(), opened.server.bind()
    near, far = (client, server) if closer == "client" else (server, client)
    message = question if closer == "client" else answer
    for number in range(100):
        near.link.send(message(number))
    near.link.close()
    near.link.close()
    await eventually(lambda: bool(far.ends))
    assert far.received == [message(number) for number in range(100)]
    await asyncio.sleep(0.05)
    assert (near.ends, far.ends) == ([None], [None])
    assert near.link.is_closed and far.link.is_closed


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_nothing_is_received_after_the_own_close(opened: Pair) -> None:
    client, server = opened.client.bind(), opened.server.bind()
    client.link.close()
    server.link.send(answer(1))
    await asyncio.sleep(0.1)
    assert client.received == []
    client.link.send(question(1))
    await asyncio.sleep(0.05)
    assert server.received == []


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_stream_that_ended_before_the_link_was_bound_is_told_in_full(opened: Pair) -> None:
    opened.client.bind().link.send(question(1))
    opened.client.link.close()
    await eventually(lambda: opened.server.link.is_closed)
    server = opened.server.bind()
    assert server.received == [question(1)]
    assert server.ends == [None]


@pytest.mark.parametrize("carrier", CARRIERS)
async def test_a_link_closed_by_an_early_message_ends_once_and_delivers_no_more(opened: Pair) -> None:
    opened.client.bind().link.send(question(1))
    opened.client.link.send(question(2))
    await asyncio.sleep(0.1)
    server = opened.server

    def close_at_once(message: Abort) -> None:
        server.received.append(message)
        server.link.close()

    server.link.bind(close_at_once, server.ends.append)
    assert server.received == [question(1)]
    assert server.ends == [None]


@pytest.mark.parametrize("carrier", SOCKET_CARRIERS)
async def test_nobody_at_the_address_is_an_os_error(carrier: str, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        await connect(address_of(carrier, tmp_path), GENERATE, timeout_s=0.3)


async def test_a_socket_file_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    address = Address("frames", str(tmp_path / "socket"))
    (tmp_path / "socket").touch()
    accepted: list[End] = []
    listener = await listen([address], GENERATE, lambda link: accepted.append(End(link).bind()))
    (await connect(address, GENERATE, timeout_s=10)).close()
    await eventually(lambda: any(end.ends for end in accepted))
    await listener.close(0)
    assert not (tmp_path / "socket").exists()


async def test_who_closes_late_leaves_the_socket_file_of_its_successor(tmp_path: Path) -> None:
    address = Address("frames", str(tmp_path / "socket"))
    accepted: list[Any] = []
    hung = await listen([address], GENERATE, accepted.append)
    successor = await listen([address], GENERATE, accepted.append)
    await hung.close(0)
    (await connect(address, GENERATE, timeout_s=10)).close()
    await eventually(lambda: len(accepted) == 1)
    await successor.close(0)
    assert not (tmp_path / "socket").exists()


# Bytes that no client of ours would send


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Path, list[End]]]:
    """A frames service: its socket, and the ends that it accepted, bound."""
    ends: list[End] = []
    path = tmp_path / "socket"
    listener = await listen([Address("frames", str(path))], GENERATE, lambda link: ends.append(End(link).bind()))
    yield path, ends
    await listener.close(0)


async def raw_frames(path: Path, versions: SpokenVersions | None = None) -> tuple[Any, asyncio.StreamWriter]:
    """A client of bytes that has said, and been told, which versions of the protocol are spoken."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(frame((versions or protocol_version.ours()).to_bytes()))
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    assert protocol_version.from_bytes(await reader.readexactly(length)) == protocol_version.ours()
    return reader, writer


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (struct.pack("<I", 64 * 2**20 + 1), "frame of 67108865 bytes"),
        (struct.pack("<I", 5) + b"\xff\xff\xff\xff\xff", "message cannot be read"),
        (b"GET / HTTP/1.1\r\n\r\n", "frame of 542393671 bytes"),
    ],
    ids=["oversized", "garbage", "another protocol"],
)
async def test_bad_bytes_end_their_link_and_no_other(
    served: tuple[Path, list[End]], sent: bytes, complaint: str
) -> None:
    path, ends = served
    neighbour = End(await connect(Address("frames", str(path)), GENERATE, timeout_s=10)).bind()
    reader, writer = await raw_frames(path)
    writer.write(sent)
    await eventually(lambda: len(ends) == 2 and bool(ends[1].ends))
    [error] = ends[1].ends
    assert isinstance(error, ProtocolError) and complaint in str(error)
    with contextlib.suppress(ConnectionError):
        assert (await reader.read()).strip(b"\0") == b"", "more than heartbeats"
    writer.close()
    neighbour.link.send(question(1))
    await eventually(lambda: ends[0].received == [question(1)])
    neighbour.link.close()


async def test_a_frame_may_come_in_single_bytes(served: tuple[Path, list[End]]) -> None:
    path, ends = served
    body = GENERATE.encode_client(question(7))
    _, writer = await raw_frames(path)
    for byte in frame(body) * 2:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.001)
    await eventually(lambda: len(ends) == 1 and ends[0].received == [question(7)] * 2)
    writer.close()


async def test_messages_of_one_read_are_delivered_together(served: tuple[Path, list[End]]) -> None:
    path, ends = served
    _, writer = await raw_frames(path)
    await eventually(lambda: len(ends) == 1)
    body = frame(GENERATE.encode_client(question(5)))
    writer.write(body * 3 + body[:2])
    await eventually(lambda: len(ends[0].received) == 3)
    writer.write(body[2:] + frame(b"\xff"))
    await eventually(lambda: len(ends[0].received) == 4 and ends[0].link.is_closed)
    assert [count for count in ends[0].deliveries if count] == [3, 4], "and also before a link ends by a bad message"
    writer.close()


async def test_a_half_sent_frame_is_dropped_with_its_link(served: tuple[Path, list[End]]) -> None:
    path, ends = served
    _, writer = await raw_frames(path)
    writer.write(struct.pack("<I", 100) + b"only this")
    await asyncio.sleep(0.02)
    writer.close()
    await eventually(lambda: bool(ends[0].ends))
    assert ends[0].received == []


async def test_a_peer_that_does_not_read_is_cut_off(served: tuple[Path, list[End]]) -> None:
    path, ends = served
    _, writer = await raw_frames(path)
    large = SchedulerStatus(False, "x" * 2**20, None)
    for _ in range(80):
        ends[0].link.send(large)
    [error] = ends[0].ends
    assert isinstance(error, OverloadedLinkError)
    writer.close()


@pytest.fixture
async def grpc_served(tmp_path: Path) -> AsyncIterator[tuple[str, list[End]]]:
    """A gRPC service: its target, and the ends that it accepted, bound."""
    ends: list[End] = []
    address = Address("grpc+unix", str(tmp_path / "socket"))
    listener = await listen([address], GENERATE, lambda link: ends.append(End(link).bind()))
    yield address.grpc_target, ends
    await listener.close(0)
    await asyncio.sleep(0.02)


def raw_call(channel: grpc.aio.Channel) -> Any:
    """A call of the stream's method that sends and receives bytes."""
    metadata = ((protocol_version.METADATA_KEY, protocol_version.ours().to_text()),)
    return channel.stream_stream(GENERATE.method)(metadata=metadata)  # type: ignore[call-arg]


async def test_garbage_over_grpc_ends_its_call(grpc_served: tuple[str, list[End]]) -> None:
    target, ends = grpc_served
    async with grpc.aio.insecure_channel(target) as channel:
        call = raw_call(channel)
        await call.write(b"\xff\xff\xff\xff\xff")
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
    [error] = ends[0].ends
    assert isinstance(error, ProtocolError)


async def test_a_cancelled_call_ends_its_link(grpc_served: tuple[str, list[End]]) -> None:
    target, ends = grpc_served
    async with grpc.aio.insecure_channel(target) as channel:
        call = raw_call(channel)
        await call.write(GENERATE.encode_client(question(1)))
        await eventually(lambda: len(ends) == 1 and ends[0].received == [question(1)])
        call.cancel()
        await eventually(lambda: bool(ends[0].ends))
    assert len(ends[0].ends) == 1


async def test_a_caller_that_does_not_read_is_cut_off(
    grpc_served: tuple[str, list[End]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_stream, "MAX_BUFFERED_MESSAGES", 16)
    target, ends = grpc_served
    async with grpc.aio.insecure_channel(target) as channel:
        call = raw_call(channel)
        await call.write(GENERATE.encode_client(question(1)))
        await eventually(lambda: len(ends) == 1)
        for number in range(40):
            ends[0].link.send(answer(number))
        [error] = ends[0].ends
        assert isinstance(error, OverloadedLinkError)
        call.cancel()


async def test_a_message_over_the_limit_ends_the_grpc_call(grpc_served: tuple[str, list[End]]) -> None:
    target, ends = grpc_served
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS[2:]) as channel:
        call = raw_call(channel)
        await call.write(b"x" * (64 * 2**20 + 1))
        await eventually(lambda: len(ends) == 1 and bool(ends[0].ends))
        assert ends[0].received == []


# Two releases


@pytest.mark.parametrize(
    ("old", "new", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 2), (2, 3), 2), ((1, 3), (2, 2), 2), ((1, 1), (2, 2), None), ((1, 2), (3, 4), None)],
)
def test_two_releases_take_the_newest_version_that_both_speak(
    old: tuple[int, int], new: tuple[int, int], agreed: int | None
) -> None:
    one, other = SpokenVersions(*old, "1.0"), SpokenVersions(*new, "2.0")
    assert protocol_version.from_bytes(one.to_bytes()) == protocol_version.from_text(one.to_text()) == one
    for here, there in ((one, other), (other, one)):
        if agreed is None:
            with pytest.raises(ProtocolVersionError, match=f"^no common protocol version: {here} here, {there} at"):
                here.agree(there)
        else:
            assert here.agree(there) == agreed


FUTURE = SpokenVersions(7, 8, "9.0")
NONE_IN_COMMON = f"{protocol_version.ours()} here, octavo 9.0 speaks 7 to 8 at the other end"


async def test_server_of_frames_says_why_it_does_not_speak_to_a_client(served: tuple[Path, list[End]]) -> None:
    path, ends = served
    reader, writer = await raw_frames(path, FUTURE)
    assert await reader.read() == b""
    writer.close()
    [error] = ends[0].ends
    assert isinstance(error, ProtocolVersionError) and NONE_IN_COMMON in error.message


@pytest.mark.parametrize("preface", [FUTURE.to_bytes(), b"\x0a\x02\x08\x01"], ids=["newer", "of old"])
async def test_client_of_frames_says_why_it_does_not_speak_to_a_server(preface: bytes, tmp_path: Path) -> None:
    async def answer_with_preface(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(preface))
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(answer_with_preface, tmp_path / "socket"):
        client = End(await connect(Address("frames", str(tmp_path / "socket")), GENERATE, timeout_s=10)).bind()
        await eventually(lambda: bool(client.ends))
    [error] = client.ends
    assert isinstance(error, ProtocolVersionError)
    assert (NONE_IN_COMMON if preface == FUTURE.to_bytes() else "does not tell its protocol version") in error.message


@pytest.mark.parametrize("told", [FUTURE.to_text(), "nonsense", ""])
async def test_both_ends_of_a_grpc_stream_say_why_they_do_not_speak(
    grpc_served: tuple[str, list[End]], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, ends = grpc_served
    async with grpc.aio.insecure_channel(target) as channel:
        metadata = ((protocol_version.METADATA_KEY, told),)
        call = channel.stream_stream(GENERATE.method)(metadata=metadata)  # type: ignore[call-arg]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    expected = NONE_IN_COMMON if told == FUTURE.to_text() else "does not tell its protocol version"
    assert expected in (refused.value.details() or "")
    assert expected in capsys.readouterr().out
    assert ends == []
