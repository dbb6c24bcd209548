"""The frames carrier: a 4-byte little-endian length, then one protobuf message, over a Unix socket.

The first frame of each end tells which versions of the protocol it speaks. An empty frame is a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

from octavo.common.errors import (
    LinkClosedError,
    OctavoError,
    OverloadedLinkError,
    ProtocolError,
    ProtocolVersionError,
)
from octavo.common.links import protocol_version
from octavo.common.links.heartbeat import HEARTBEAT, BeatingLink
from octavo.common.links.link import Link, StreamCodec
from octavo.common.links.socket_files import SocketFile, for_this_user

MAX_FRAME_BYTES = 64 * 2**20
MAX_BUFFERED_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")


class FramesLink(asyncio.Protocol, BeatingLink):
    """One end of a Unix-socket stream."""

    def __init__(
        self,
        encode: Callable[[Any], bytes],
        decode: Callable[[bytes], Any],
        on_connected: Callable[[FramesLink], None] | None = None,
    ) -> None:
        BeatingLink.__init__(self)
        self._encode, self._decode = encode, decode
        self._on_connected = on_connected
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._is_agreed = False
        """The other end speaks our version."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own classes do not derive from asyncio's
        self._write(protocol_version.ours().to_bytes())
        self._begin_beats()
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        self._heard()
        try:
            self._read(data)
        finally:
            self._delivered()

    def _read(self, data: bytes) -> None:
        received = self._received or data  # a message mostly comes whole, and then is not copied
        if received is not data:
            self._received += data
        start = 0
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            if length > MAX_FRAME_BYTES:
                self._fail(ProtocolError(f"frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed"))
                return
            end = start + _LENGTH.size + length
            if len(received) < end:
                break
            body, start = bytes(received[start + _LENGTH.size : end]), end
            if not self._is_agreed:
                if not self._agree(body):
                    return
                continue
            if body == HEARTBEAT:
                continue
            try:
                message = self._decode(body)
            except (ValueError, ProtocolError) as error:
                self._fail(ProtocolError(f"message cannot be read: {error}"))
                return
            self._deliver(message)
        if received is not data:
            del self._received[:start]
        elif start < len(data):
            self._received += data[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(LinkClosedError(f"connection lost: {exc}") if exc else None)

    def send(self, message: Any) -> None:
        if self._closed or self._transport is None:
            return
        self._write(self._encode(message))
        if self._transport.get_write_buffer_size() > MAX_BUFFERED_BYTES:
            self._fail(OverloadedLinkError(f"the peer left more than {MAX_BUFFERED_BYTES} bytes unread"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._ended(None)

    def _write(self, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(_LENGTH.pack(len(body)) + body)

    def _send_heartbeat(self) -> None:
        self._write(HEARTBEAT)

    def _give_up(self, error: LinkClosedError) -> None:
        self._fail(error)

    def _agree(self, preface: bytes) -> bool:
        try:
            protocol_version.ours().agree(protocol_version.from_bytes(preface))
        except ProtocolVersionError as error:
            assert self._transport is not None
            self._transport.close()  # after what we speak has been sent, so that the other end can say it, too
            self._ended(error)
            return False
        self._is_agreed = True
        return True

    def _fail(self, error: OctavoError) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._ended(error)


async def connect_frames(path: str, codec: StreamCodec[Any, Any]) -> Link[Any, Any]:
    """The client's end. Raises OSError if nobody listens."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_unix_connection(lambda: FramesLink(codec.encode_client, codec.decode_server), path)
    return link


async def listen_frames(
    path: str, codec: StreamCodec[Any, Any], accept: Callable[[Link[Any, Any]], None]
) -> tuple[asyncio.AbstractServer, SocketFile]:
    """Accept streams of this user's processes at `path`. A socket file that is there is replaced: who left it is dead,
    or hangs and has been succeeded."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listening = socket.socket(socket.AF_UNIX)
    try:
        with for_this_user():
            listening.bind(path)
        file = SocketFile(path)
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(
            lambda: FramesLink(codec.encode_server, codec.decode_client, accept), sock=listening
        )
        return server, file
    except BaseException:
        listening.close()
        raise
