"""Copies between device and host that a worker has been told of and has not finished."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.common.block_hash import BlockKey
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import Transfer, TransferDirection
from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.host_pool import HostPool
from octavo.kvmanager.pool_events import EventKind


class Purpose(enum.Enum):
    """What a transfer is for. With SINK alone, the device blocks have new owners already."""

    SWAP_OUT = enum.auto()
    SWAP_IN = enum.auto()
    SINK = enum.auto()
    RESTORE = enum.auto()


@dataclass(slots=True)
class OpenTransfer:
    """A transfer on its way."""

    purpose: Purpose
    sequence_id: int
    """0 for a SINK."""
    device_ids: tuple[int, ...]
    host_ids: tuple[int, ...]
    keys: list[BlockKey | None]
    """What each block is found by once the bytes have arrived; None for one that is not to be found."""
    parents: list[BlockKey | None]
    """Key of the block before each. Means something only where there is a key."""


class Transfers:
    """Numbers transfers, and holds both ends until each is finished."""

    def __init__(self, blocks: BlockPool, host: HostPool) -> None:
        self._blocks = blocks
        self._host = host
        self._open: dict[int, OpenTransfer] = {}
        self._last_id = 0
        self._untold: list[Transfer] = []

    def __iter__(self) -> Iterator[OpenTransfer]:
        return iter(self._open.values())

    def begin(
        self,
        purpose: Purpose,
        device_ids: Sequence[int],
        generations: Sequence[int],
        host_ids: Sequence[int],
        keys: list[BlockKey | None],
        parents: list[BlockKey | None],
        sequence_id: int = 0,
    ) -> int:
        """A new transfer for the next reply; its id, or 0 if there is nothing to copy."""
        if not device_ids:
            return 0
        self._last_id += 1
        is_out = purpose in (Purpose.SWAP_OUT, Purpose.SINK)
        direction = TransferDirection.TO_HOST if is_out else TransferDirection.TO_DEVICE
        self._untold.append(
            Transfer(self._last_id, direction, tuple(device_ids), tuple(generations), tuple(host_ids)),
        )
        self._open[self._last_id] = OpenTransfer(
            purpose, sequence_id, tuple(device_ids), tuple(host_ids), keys, parents
        )
        self._host.begin_transfer(host_ids)
        return self._last_id

    def take_untold(self) -> list[Transfer]:
        """Those that the reply must carry."""
        untold, self._untold = self._untold, []
        return untold

    def is_open_for(self, sequence_id: int) -> bool:
        return any(transfer.sequence_id == sequence_id for transfer in self._open.values())

    def finish(self, transfer_id: int) -> None:
        """The bytes have arrived. Raises ProtocolError if no such transfer is open."""
        done = self._open.pop(transfer_id, None)
        if done is None:
            raise ProtocolError(f"transfer {transfer_id} has ended, but was not open")
        if done.purpose is Purpose.SINK:
            for host_id, key, parent in zip(done.host_ids, done.keys, done.parents, strict=True):
                if key is None:
                    self._host.give_back([host_id])
                else:
                    self._host.keep_cached(host_id, key, parent)
        else:
            if done.purpose is not Purpose.SWAP_OUT:
                for device_id, key, parent in zip(done.device_ids, done.keys, done.parents, strict=True):
                    if key is not None:
                        self._blocks.publish(device_id, key, parent, EventKind.RESTORED)
            for device_id in done.device_ids:
                self._blocks.end_transfer(device_id)
        self._host.end_transfer(done.host_ids)

    def abandon(self) -> None:
        """All have ended, or never began: what they would have filled holds nothing that is known."""
        self.forget_keys(lambda key: True)
        for transfer_id in list(self._open):
            self.finish(transfer_id)

    def forget_keys(self, matches: Callable[[BlockKey], bool]) -> None:
        """What is on its way will not be found by a key that matches."""
        for transfer in self._open.values():
            transfer.keys = [None if key is not None and matches(key) else key for key in transfer.keys]
