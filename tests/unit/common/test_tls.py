"""Links over TCP with mutual TLS: who has a certificate of the CA gets in, nobody else, and the reason is told."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic_settings import SettingsConfigDict
from structlog.testing import capture_logs

from octavo.common.admin import AdminServicer
from octavo.common.codecs.generation import GENERATE
from octavo.common.codecs.step import WORKER_STEPS
from octavo.common.errors import OctavoError
from octavo.common.links import Address, Link, TlsFiles, connect, listen, open_channel
from octavo.common.messages.generation import Abort
from octavo.common.roles import Role
from octavo.common.service_config import ServiceConfig
from octavo.v1.admin_service_pb2 import GetHealthRequest
from octavo.v1.admin_service_pb2_grpc import AdminServiceStub
from support.certificates import issue, make_ca

TIMEOUT_S = 0.5


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    return make_ca(tmp_path / "ca")


def free_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("grpc", f"127.0.0.1:{probe.getsockname()[1]}")


@asynccontextmanager
async def served(tls: TlsFiles | None) -> AsyncIterator[tuple[Address, list[Any]]]:
    """A service at a port of this host, and what it has received."""
    received: list[Any] = []
    address = free_address()

    def accept(link: Link[Any, Any]) -> None:
        link.bind(received.append, lambda error: None)

    listener = await listen([address], GENERATE, accept, tls=tls)
    yield address, received
    await listener.close(0.1)
    await asyncio.sleep(0.02)


async def says_hello(address: Address, received: list[Any], tls: TlsFiles) -> None:
    """A client with these files gets a message through."""
    num_received = len(received)
    link = await connect(address, GENERATE, 10, tls)
    link.bind(lambda message: None, lambda error: None)
    link.send(Abort(7))
    async with asyncio.timeout(10):
        while len(received) == num_received:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert received[-1] == Abort(7)
    link.close()


async def refusal(address: Address, tls: TlsFiles | None) -> str:
    with pytest.raises(OSError, match="no answer from") as refused:
        await connect(address, GENERATE, TIMEOUT_S, tls)
    return str(refused.value)


async def test_two_certificates_of_one_ca_understand_one_another(ca: Path) -> None:
    async with served(issue(ca, Role.SCHEDULER)) as (address, received):
        await says_hello(address, received, issue(ca, Role.GATEWAY))


async def test_a_client_without_a_certificate_is_turned_away(ca: Path) -> None:
    async with served(issue(ca, Role.SCHEDULER)) as (address, received):
        assert "it may want TLS" in await refusal(address, None)
        only_ca = grpc.ssl_channel_credentials((ca / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(address.target, only_ca) as channel:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
        assert received == []


async def test_a_certificate_of_another_ca_is_refused_by_either_end(ca: Path, tmp_path: Path) -> None:
    other = make_ca(tmp_path / "other")
    stranger = issue(other, Role.GATEWAY)
    async with served(issue(ca, Role.SCHEDULER)) as (address, received):
        trusting = TlsFiles(ca / "ca.pem", stranger.cert, stranger.key)
        assert f"not the certificate in {stranger.cert}" in await refusal(address, trusting)
        assert "unable to get local issuer certificate" in await refusal(address, stranger)
        assert received == []


async def test_a_server_of_another_role_is_refused(ca: Path) -> None:
    async with served(issue(ca, Role.WORKER)) as (address, received):
        reason = await refusal(address, issue(ca, Role.GATEWAY))
        assert "its certificate is not for scheduler.octavo.internal" in reason
        assert received == []


async def test_a_client_of_another_role_is_refused(ca: Path) -> None:
    async with served(issue(ca, Role.SCHEDULER)) as (address, received):
        link = await connect(address, GENERATE, 10, issue(ca, Role.WORKER))
        ended: asyncio.Future[OctavoError | None] = asyncio.get_running_loop().create_future()
        link.bind(lambda message: None, ended.set_result)
        link.send(Abort(7))
        error = await asyncio.wait_for(ended, 10)
        assert "this is for gateway.octavo.internal; the certificate is of worker.octavo.internal" in str(error)
        assert received == []


@pytest.mark.parametrize("role", Role)
async def test_other_calls_than_the_stream_are_for_gateways_and_operators(ca: Path, role: Role) -> None:
    address = free_address()
    admin = AdminServicer(lambda: "still loading")
    listener = await listen([address], WORKER_STEPS, lambda link: None, [admin.add_to], issue(ca, Role.WORKER))
    async with open_channel(address.target, Role.WORKER, issue(ca, role)) as channel:
        call = AdminServiceStub(channel).GetHealth(GetHealthRequest(), timeout=10)
        if role in (Role.GATEWAY, Role.OPERATOR):
            assert (await call).reason == "still loading"
        else:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await listener.close(0)


async def test_answers_in_several_parts_come_through_the_gate_or_do_not(ca: Path) -> None:
    async def count(request: bytes, context: Any) -> None:
        for number in range(3):
            await context.write(b"%d" % number)

    def add_to(server: grpc.aio.Server) -> None:
        handlers = {"Count": grpc.unary_stream_rpc_method_handler(count)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bakery", handlers),))

    address = free_address()
    listener = await listen([address], WORKER_STEPS, lambda link: None, [add_to], issue(ca, Role.WORKER))
    async with open_channel(address.target, Role.WORKER, issue(ca, Role.OPERATOR)) as channel:
        assert [part async for part in channel.unary_stream("/Bakery/Count")(b"", timeout=10)] == [b"0", b"1", b"2"]
    async with open_channel(address.target, Role.WORKER, issue(ca, Role.SCHEDULER)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_stream("/Bakery/Count")(b"", timeout=10).read()
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await listener.close(0)


async def test_a_client_with_tls_does_not_fall_back_to_plain_text(ca: Path) -> None:
    async with served(None) as (address, received):
        assert "it takes no TLS" in await refusal(address, issue(ca, Role.GATEWAY))
        assert received == []


async def test_nobody_there_is_told_as_such(ca: Path) -> None:
    assert "refused" in (await refusal(free_address(), issue(ca, Role.GATEWAY))).lower()


async def test_renewed_certificates_are_taken_without_a_restart(ca: Path, tmp_path: Path) -> None:
    """The deployment moves to another CA in place: old clients are out, new ones are in."""
    server, old_client = issue(ca, Role.SCHEDULER), issue(ca, Role.GATEWAY)
    async with served(server) as (address, received):
        await says_hello(address, received, old_client)
        other = make_ca(tmp_path / "other")
        new_server, new_client = issue(other, Role.SCHEDULER), issue(other, Role.GATEWAY)
        for old, new in zip(
            (server.ca, server.cert, server.key), (new_server.ca, new_server.cert, new_server.key), strict=True
        ):
            os.replace(new, old)
        renewed = TlsFiles(server.ca, new_client.cert, new_client.key)
        await says_hello(address, received, renewed)
        await refusal(address, TlsFiles(server.ca, old_client.cert, old_client.key))


async def test_a_broken_renewal_keeps_the_last_certificate(ca: Path) -> None:
    server = issue(ca, Role.SCHEDULER)
    async with served(server) as (address, received):
        client = issue(ca, Role.GATEWAY)
        await says_hello(address, received, client)
        server.key.write_text("half a file")
        with capture_logs() as logs:
            await says_hello(address, received, client)
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["certificate not renewed"]


@pytest.mark.parametrize("scheme", ["frames", "grpc+unix"])
async def test_unix_sockets_are_for_the_same_user_only(tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "socket"
    listener = await listen([Address(scheme, str(path))], GENERATE, lambda link: None)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    await listener.close(0)


async def test_a_port_for_other_hosts_without_tls_is_warned_of() -> None:
    local = free_address()
    port = local.target.rpartition(":")[2]
    for address, is_warned in ((local, False), (Address("grpc", f"0.0.0.0:{port}"), True)):
        with capture_logs() as logs:
            listener = await listen([address], GENERATE, lambda link: None)
            await listener.close(0)
        assert any("without TLS" in entry["event"] for entry in logs) is is_warned


class BakeryConfig(ServiceConfig):
    model_config = SettingsConfigDict(env_prefix="BAKERY_")


def flags(**files: Path) -> list[str]:
    return [part for name, path in files.items() for part in (f"--link-{name}", str(path))]


def test_settings_name_the_files(ca: Path) -> None:
    files = issue(ca, Role.WORKER)
    config = BakeryConfig.from_command_line(flags(ca=files.ca, cert=files.cert, key=files.key))
    assert config.link_tls == files
    assert BakeryConfig.from_command_line([]).link_tls is None


def test_settings_that_are_not_whole_are_refused_in_one_line(ca: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = issue(ca, Role.SCHEDULER), issue(ca, Role.GATEWAY)
    for arguments, complaint in (
        (flags(ca=one.ca), "TLS between services needs link_cert, link_key as well"),
        (flags(ca=one.ca, cert=one.cert, key=other.key), "no certificate and its key"),
        (flags(ca=one.key, cert=one.cert, key=one.key), "no certificate of a CA"),
    ):
        with pytest.raises(SystemExit) as exit_:
            BakeryConfig.from_command_line(arguments)
        assert exit_.value.code == 2
        assert complaint in capsys.readouterr().err
