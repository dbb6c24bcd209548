"""`connect` and `listen`: the carrier by the address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc
import structlog

from octavo.common.links.address import Address
from octavo.common.links.channel import CHANNEL_OPTIONS
from octavo.common.links.frames import connect_frames, listen_frames
from octavo.common.links.grpc_stream import connect_grpc, stream_handler
from octavo.common.links.link import Link, StreamCodec
from octavo.common.links.role_check import UnaryCallGate
from octavo.common.links.socket_files import SocketFile, for_this_user
from octavo.common.links.tls import TlsFiles
from octavo.common.roles import Role

log = structlog.get_logger()

Client = TypeVar("Client")
Server = TypeVar("Server")


async def connect(
    address: Address, codec: StreamCodec[Client, Server], timeout_s: float, tls: TlsFiles | None = None
) -> Link[Client, Server]:
    """Open a stream to the service at `address`; over TCP by mutual TLS, if there is `tls`.

    Raises OSError if nobody answers within `timeout_s`, or if one end does not accept the other's certificate.
    """
    if address.is_grpc:
        return await connect_grpc(address.grpc_target, codec, timeout_s, tls)
    async with asyncio.timeout(timeout_s):
        return await connect_frames(address.target, codec)


class Listener:
    """The open listening sockets of one service."""

    def __init__(self) -> None:
        self._frame_servers: list[tuple[asyncio.AbstractServer, SocketFile]] = []
        self._grpc_servers: list[grpc.aio.Server] = []

    async def close(self, grace_s: float) -> None:
        """Stop to accept, give running calls `grace_s`, then cut them."""
        for server, file in self._frame_servers:
            server.close()
            file.remove()
        await asyncio.gather(*(server.stop(grace_s) for server in self._grpc_servers))


async def listen(
    addresses: Sequence[Address],
    codec: StreamCodec[Client, Server],
    accept: Callable[[Link[Server, Client]], None],
    unary_handlers: Sequence[Callable[[grpc.aio.Server], None]] = (),
    tls: TlsFiles | None = None,
) -> Listener:
    """Serve one stream method at every address, and the unary services at the gRPC ones.

    `unary_handlers` are functions that add a generated servicer to a server. Over TCP, with `tls`, a client must show a
    certificate of its CA: the stream is for the role of the codec's client, the unary services are for gateways and
    operators. Unix sockets are for processes of this user only. Raises OSError if a TCP address is taken.
    """
    listener = Listener()
    for address in addresses:
        if not address.is_grpc:
            listener._frame_servers.append(await listen_frames(address.target, codec, accept))
            continue
        is_secured = tls is not None and address.scheme == "grpc"
        gates = [UnaryCallGate([Role.GATEWAY, Role.OPERATOR])] if is_secured else []
        grpc_server = grpc.aio.server(interceptors=gates, options=CHANNEL_OPTIONS)
        grpc_server.add_generic_rpc_handlers((stream_handler(codec, accept, asks_role=is_secured),))
        for add_servicer in unary_handlers:
            add_servicer(grpc_server)
        try:
            _bind(grpc_server, address, tls)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await grpc_server.start()
        listener._grpc_servers.append(grpc_server)
    return listener


def _bind(server: grpc.aio.Server, address: Address, tls: TlsFiles | None) -> None:
    """Raises RuntimeError if the address is taken, OSError if a file cannot be read."""
    if tls is not None and address.scheme == "grpc":
        server.add_secure_port(address.grpc_target, tls.server_credentials())
        return
    if address.is_network:
        log.warning("listening without TLS: whoever reaches this port can use the service", address=str(address))
    with for_this_user():
        server.add_insecure_port(address.grpc_target)
