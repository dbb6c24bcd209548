"""The gRPC carrier: one bidirectional streaming call per link, its messages already encoded.

An empty message is a heartbeat. gRPC's own keepalive asks the process, not its event loop, and only every 10 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import structlog

from octavo.common.errors import LinkClosedError, OverloadedLinkError, ProtocolError, ProtocolVersionError
from octavo.common.links import protocol_version
from octavo.common.links.channel import open_channel
from octavo.common.links.heartbeat import HEARTBEAT, BeatingLink
from octavo.common.links.link import Link, StreamCodec
from octavo.common.links.role_check import require_role
from octavo.common.links.tls import TlsFiles
from octavo.common.roles import Role

log = structlog.get_logger()

MAX_BUFFERED_MESSAGES = 65_536
_PROBE_TIMEOUT_S = 0.2
_CUT_OFF = ("Socket closed", "Connection reset", "WRONG_VERSION_NUMBER")
"""How gRPC tells that the other end did not like our handshake."""
_OF_ANOTHER_NAME = "Hostname Verification Check failed"

_END = object()


class GrpcLink(BeatingLink):
    """One end of a streaming call. `pump` is run by whoever owns the call."""

    def __init__(self, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        super().__init__()
        self._encode, self._decode = encode, decode
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._begin_beats()

    def send(self, message: Any) -> None:
        if self._closed:
            return
        self._outbox.put_nowait(self._encode(message))
        if self._outbox.qsize() > MAX_BUFFERED_MESSAGES:
            self._outbox.put_nowait(_END)
            self._ended(OverloadedLinkError(f"the peer left more than {MAX_BUFFERED_MESSAGES} messages unread"))

    def close(self) -> None:
        self._outbox.put_nowait(_END)
        self._ended(None)

    def _send_heartbeat(self) -> None:
        self._outbox.put_nowait(HEARTBEAT)

    def _give_up(self, error: LinkClosedError) -> None:
        self._outbox.put_nowait(_END)
        self._ended(error)

    async def outgoing(self) -> AsyncIterator[bytes]:
        """Encoded messages until the link is closed."""
        while (item := await self._outbox.get()) is not _END:
            yield item

    async def pump(self, incoming: AsyncIterator[bytes]) -> None:
        """Deliver what comes in until the call ends."""
        try:
            async for body in incoming:
                self._heard()
                if body == HEARTBEAT:
                    continue
                try:
                    message = self._decode(body)
                except ValueError as error:
                    raise ProtocolError(f"message cannot be read: {error}") from error
                self._deliver(message)
                self._delivered()
        except ProtocolError as error:
            self._ended(error)
        except grpc.aio.AioRpcError as error:
            self._ended(LinkClosedError(f"{error.code().name}: {error.details()}"))
        except asyncio.CancelledError:
            self._ended(LinkClosedError("the call was cancelled"))
            raise
        else:
            self._ended(None)
        finally:
            self._outbox.put_nowait(_END)


class _ClientLink(GrpcLink):
    """Owns its channel; both end together."""

    def __init__(self, channel: grpc.aio.Channel, codec: StreamCodec[Any, Any]) -> None:
        super().__init__(codec.encode_client, codec.decode_server)
        self._channel = channel
        call = channel.stream_stream(codec.method, request_serializer=None, response_deserializer=None)
        metadata = ((protocol_version.METADATA_KEY, protocol_version.ours().to_text()),)
        self._task = asyncio.create_task(self._run(call(self.outgoing(), metadata=metadata)))

    async def _run(self, call: Any) -> None:
        try:
            await self.pump(call)
        finally:
            await self._channel.close(None)

    def _give_up(self, error: LinkClosedError) -> None:
        super()._give_up(error)
        self._task.cancel()


async def connect_grpc(
    target: str, codec: StreamCodec[Any, Any], timeout_s: float, tls: TlsFiles | None = None
) -> Link[Any, Any]:
    """The client's end. Raises OSError if nobody answers within `timeout_s`, or not in the way that `tls` asks for."""
    channel = open_channel(target, codec.server, tls)
    try:
        async with asyncio.timeout(timeout_s):
            await channel.channel_ready()
    except TimeoutError:
        reason = await _why_not_connected(channel, codec.server, tls)
        await channel.close(None)
        raise OSError(f"no answer from {target} within {timeout_s} s: {reason}") from None
    return _ClientLink(channel, codec)


async def _why_not_connected(channel: grpc.aio.Channel, server: Role, tls: TlsFiles | None) -> str:
    """What gRPC knows of the last attempt: it tells that only by the error of a call."""
    probe = channel.unary_unary("/grpc.health.v1.Health/Check", request_serializer=None, response_deserializer=None)
    try:
        await probe(b"", timeout=_PROBE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        details = (error.details() or error.code().name).rpartition("last error: ")[2]
        if _OF_ANOTHER_NAME in details:
            return f"its certificate is not for {server.certificate_name}"
        if not any(sign in details for sign in _CUT_OFF):
            return details
        accepts = f"it takes no TLS, or not the certificate in {tls.cert}" if tls else "it may want TLS"
        return f"{details} ({accepts}: see its log)"
    return "it has begun to answer since"


def stream_handler(
    codec: StreamCodec[Any, Any], accept: Callable[[Link[Any, Any]], None], *, asks_role: bool
) -> grpc.GenericRpcHandler[Any, Any]:
    """A handler that turns each call of the codec's method into a link and gives it to `accept`.

    With `asks_role`, over TLS, the caller's certificate is to be for the role of the codec's client.
    """

    async def handle(incoming: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        if asks_role:
            await require_role(context, [codec.client])
        told = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        try:
            spoken = protocol_version.from_text(told.get(protocol_version.METADATA_KEY, ""))
            protocol_version.ours().agree(spoken)
        except ProtocolVersionError as error:
            log.warning("stream refused", peer=context.peer(), reason=error.reason, error=error.message)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        link = GrpcLink(codec.encode_server, codec.decode_client)
        accept(link)
        reader = asyncio.create_task(link.pump(incoming))
        try:
            async for body in link.outgoing():
                yield body
        finally:
            reader.cancel()

    service, _, method = codec.method.lstrip("/").partition("/")
    return grpc.method_handlers_generic_handler(service, {method: grpc.stream_stream_rpc_method_handler(handle)})
