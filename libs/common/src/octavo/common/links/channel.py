"""gRPC channels between services, and what both ends of one are told alike."""

from __future__ import annotations

import grpc

from octavo.common.links.tls import TlsFiles
from octavo.common.roles import Role

MAX_MESSAGE_BYTES = 64 * 2**20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # One definition for both ends: a client that pings more often than the server allows is cut off.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
]


def open_channel(target: str, server: Role, tls: TlsFiles | None) -> grpc.aio.Channel:
    """A channel to a target in gRPC's notation; with TLS, which is for TCP, only to a server of this role.

    Raises OSError if a file of `tls` is unreadable.
    """
    if tls is None or target.startswith("unix:"):
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    asked = ("grpc.ssl_target_name_override", server.certificate_name)
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=[*CHANNEL_OPTIONS, asked])
