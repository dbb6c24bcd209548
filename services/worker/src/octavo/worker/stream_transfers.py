"""Copies blocks beside the steps: one stream out, one in. Events keep the order wherever two of the streams meet."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.common.messages.kv import Transfer, TransferDirection
from octavo.worker.block_transfers import BlockTransfers
from octavo.worker.runner import FinishedTransfers

TO_HOST, TO_DEVICE = TransferDirection.TO_HOST, TransferDirection.TO_DEVICE


class CopyDevice(ABC):
    """What copies are made with: a GPU, or a model of one in tests. Streams and events behave as torch's."""

    @abstractmethod
    def compute_stream(self) -> torch.cuda.Stream:
        """The stream that steps are launched on."""

    @abstractmethod
    def new_stream(self) -> torch.cuda.Stream:
        """A stream for copies."""

    @abstractmethod
    def new_event(self, *, timed: bool = True) -> torch.cuda.Event:
        """An event, which knows its time if it is `timed`."""

    @abstractmethod
    def copy(self, stream: torch.cuda.Stream, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each (target, source) on the stream, in order."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A transfer on its stream."""

    transfer_id: int
    direction: TransferDirection
    device_ids: frozenset[int]
    host_ids: frozenset[int]
    began: torch.cuda.Event
    ended: torch.cuda.Event


class StreamTransfers(BlockTransfers):
    """Nothing here waits for the device but `finished(wait=True)`.

    A copy begins after everything that the compute stream was given before it: a block is read after its last writer,
    and filled after its last reader. Copies of one direction run in order; one that touches a block, of device or host,
    which an unfinished copy of the other direction touches begins after that. The next writer or reader of a block on
    the compute stream waits by `before_compute`.
    """

    def __init__(self, pool: Tensor, host: Tensor, device: CopyDevice) -> None:
        super().__init__(pool, host)
        self._device = device
        self._streams = {TO_HOST: device.new_stream(), TO_DEVICE: device.new_stream()}
        self._running: list[_Running] = []
        self._lock = threading.Lock()
        """One thread launches, another one waits for results."""

    def to_host(self, transfers: Sequence[Transfer]) -> None:
        """See BlockTransfers."""
        self._begin(transfers, TO_HOST, lambda one: _pairs(self._host, one.host_ids, self._pool, one.device_ids))

    def to_device(self, transfers: Sequence[Transfer]) -> None:
        """See BlockTransfers."""
        self._begin(transfers, TO_DEVICE, lambda one: _pairs(self._pool, one.device_ids, self._host, one.host_ids))

    def _begin(
        self,
        transfers: Sequence[Transfer],
        direction: TransferDirection,
        pairs_of: Callable[[Transfer], Iterable[tuple[Tensor, Tensor]]],
    ) -> None:
        if not transfers:
            return
        stream = self._streams[direction]
        stream.wait_event(self._device.compute_stream().record_event(self._device.new_event(timed=False)))
        for transfer in transfers:
            device_ids, host_ids = frozenset(transfer.device_ids), frozenset(transfer.host_ids)
            for other in self._unfinished():
                meets = not (other.device_ids.isdisjoint(device_ids) and other.host_ids.isdisjoint(host_ids))
                if other.direction is not direction and meets:
                    stream.wait_event(other.ended)
            began = stream.record_event(self._device.new_event())
            self._device.copy(stream, pairs_of(transfer))
            ended = stream.record_event(self._device.new_event())
            with self._lock:
                self._running.append(_Running(transfer.transfer_id, direction, device_ids, host_ids, began, ended))
            self._count(direction.name.lower(), len(transfer.host_ids))

    def before_compute(self, block_ids: Iterable[int]) -> None:
        """See BlockTransfers."""
        unfinished = self._unfinished()
        if not unfinished:
            return
        touched = set(block_ids)
        for running in unfinished:
            if not running.device_ids.isdisjoint(touched):
                self._device.compute_stream().wait_event(running.ended)

    def finished(self, *, wait: bool) -> FinishedTransfers:
        """See BlockTransfers."""
        unfinished = self._unfinished()
        if wait:
            for running in unfinished:
                running.ended.synchronize()
        done = [running for running in unfinished if running.ended.query()]  # type: ignore[no-untyped-call]
        with self._lock:
            self._running = [running for running in self._running if running not in done]
        copy_ms = sum(running.began.elapsed_time(running.ended) for running in done)
        return FinishedTransfers([running.transfer_id for running in done], int(copy_ms * 1000))

    def _unfinished(self) -> list[_Running]:
        with self._lock:
            return list(self._running)


def _pairs(
    target: Tensor, target_ids: Sequence[int], source: Tensor, source_ids: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    for first_target, first_source, length in contiguous_runs(target_ids, source_ids):
        yield target[first_target : first_target + length], source[first_source : first_source + length]


def contiguous_runs(target_ids: Sequence[int], source_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut the pairs into the fewest runs in which both ids rise by one: (first target, first source, length)."""
    first = 0
    for place in range(1, len(target_ids) + 1):
        length = place - first
        if (
            place == len(target_ids)
            or target_ids[place] != target_ids[first] + length
            or source_ids[place] != source_ids[first] + length
        ):
            yield target_ids[first], source_ids[first], length
            first = place


class CudaCopies(CopyDevice):
    """Streams, events and copies of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute_stream(self) -> torch.cuda.Stream:
        """See CopyDevice."""
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> torch.cuda.Stream:
        """See CopyDevice."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def new_event(self, *, timed: bool = True) -> torch.cuda.Event:
        """See CopyDevice."""
        return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]

    def copy(self, stream: torch.cuda.Stream, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """See CopyDevice. Host tensors are pinned."""
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
