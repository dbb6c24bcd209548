"""The link interface that all carriers implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from octavo.common.errors import OctavoError
from octavo.common.roles import Role

Sent = TypeVar("Sent")
Received = TypeVar("Received")
Client = TypeVar("Client")
Server = TypeVar("Server")


@dataclass(frozen=True, slots=True)
class StreamCodec(Generic[Client, Server]):
    """How the two directions of one stream look as bytes, and the gRPC method that carries it."""

    method: str
    """Full gRPC method name, `/octavo.v1.Service/Method`."""
    client: Role
    server: Role
    encode_client: Callable[[Client], bytes]
    decode_client: Callable[[bytes], Client]
    encode_server: Callable[[Server], bytes]
    decode_server: Callable[[bytes], Server]


class Link(ABC, Generic[Sent, Received]):
    """One end of an ordered message stream. All callbacks run on the event loop that opened it.

    Until `bind` is called, received messages wait. After a close, from either side, `on_closed` is called exactly
    once, with the error that ended the stream or None for an orderly end, and nothing is received any more.
    """

    _on_message: Callable[[Received], None] | None = None
    _on_closed: Callable[[OctavoError | None], None] | None = None
    _on_delivered: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._early: list[Received] = []
        self._closed = False
        self._error: OctavoError | None = None

    def bind(
        self,
        on_message: Callable[[Received], None],
        on_closed: Callable[[OctavoError | None], None],
        on_delivered: Callable[[], None] | None = None,
    ) -> None:
        """Start to receive. Messages that came before are delivered at once, in order.

        `on_delivered` is called after each message, or once after several that came together; also after none.
        """
        had_ended = self._closed
        self._on_message, self._on_closed, self._on_delivered = on_message, on_closed, on_delivered
        early, self._early = self._early, []
        if self._error is None:
            for message in early:
                if self._closed and not had_ended:
                    return  # the last message made its receiver close the link
                on_message(message)
            self._delivered()
        if had_ended:
            on_closed(self._error)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_quiet(self) -> bool:
        """The other end has given no sign of life for some seconds: it hangs, or the way to it does."""
        return False

    @abstractmethod
    def send(self, message: Sent) -> None:
        """Queue a message. Never blocks; on a closed link it does nothing, since `on_closed` tells.

        If the other end reads so slowly that more than the buffer limit is queued, the link is closed with
        `OverloadedLinkError`.
        """

    @abstractmethod
    def close(self) -> None:
        """End the stream in order: what was sent before is still delivered."""

    def _deliver(self, message: Received) -> None:
        if self._closed:
            return
        if self._on_message is None:
            self._early.append(message)
        else:
            self._on_message(message)

    def _delivered(self) -> None:
        """To be called by carriers after what they have delivered in one go."""
        if self._on_delivered is not None:
            self._on_delivered()

    def _ended(self, error: OctavoError | None) -> None:
        """To be called by carriers when the stream has ended, any number of times."""
        if self._closed:
            return
        self._closed, self._error = True, error
        if self._on_closed is not None:
            self._on_closed(error)
