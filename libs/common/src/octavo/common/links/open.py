"""`connect` and `listen`: the carrier by the address."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import grpc

from octavo.common.links.address import Address
from octavo.common.links.frames import connect_frames, listen_frames
from octavo.common.links.grpc_stream import CHANNEL_OPTIONS, connect_grpc, stream_handler
from octavo.common.links.link import Link, StreamCodec

Client = TypeVar("Client")
Server = TypeVar("Server")


async def connect(address: Address, codec: StreamCodec[Client, Server], timeout_s: float) -> Link[Client, Server]:
    """Open a stream to the service at `address`. Raises OSError if nobody answers within `timeout_s`."""
    if address.is_grpc:
        return await connect_grpc(address.grpc_target, codec, timeout_s)
    return await asyncio.wait_for(connect_frames(address.target, codec), timeout_s)


class Listener:
    """The open listening sockets of one service."""

    def __init__(self) -> None:
        self._frame_servers: list[tuple[str, asyncio.AbstractServer]] = []
        self._grpc_servers: list[grpc.aio.Server] = []

    async def close(self, grace_s: float) -> None:
        """Stop to accept, give running calls `grace_s`, then cut them."""
        for path, server in self._frame_servers:
            server.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        await asyncio.gather(*(server.stop(grace_s) for server in self._grpc_servers))


async def listen(
    addresses: Sequence[Address],
    codec: StreamCodec[Client, Server],
    accept: Callable[[Link[Server, Client]], None],
    unary_handlers: Sequence[Callable[[grpc.aio.Server], None]] = (),
) -> Listener:
    """Serve one stream method at every address, and the unary services at the gRPC ones.

    `unary_handlers` are functions that add a generated servicer to a server. Raises OSError if an address is taken.
    """
    listener = Listener()
    for address in addresses:
        if not address.is_grpc:
            server = await listen_frames(address.target, codec, accept)
            listener._frame_servers.append((address.target, server))
            continue
        grpc_server = grpc.aio.server(options=CHANNEL_OPTIONS)
        grpc_server.add_generic_rpc_handlers((stream_handler(codec, accept),))
        for add_servicer in unary_handlers:
            add_servicer(grpc_server)
        try:
            grpc_server.add_insecure_port(address.grpc_target)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await grpc_server.start()
        listener._grpc_servers.append(grpc_server)
    return listener
