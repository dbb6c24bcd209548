"""Copies whole blocks between the KV pool and host memory: at once on a CPU, on streams of their own on a GPU."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from octavo.common.messages.kv import Transfer
from octavo.worker import metrics
from octavo.worker.runner import FinishedTransfers


class BlockTransfers(ABC):
    """Owns host memory, of the same layout as the pool.

    Order within a plan: `to_host`, then `before_compute`, then the plan's block copies, then `to_device`, then rows.
    What a copy to the host reads is as the steps before it have left it, and no later step overwrites it too early.
    """

    def __init__(self, pool: Tensor, host: Tensor) -> None:
        self._pool = pool
        self._host = host
        self._block_bytes = pool[0].numel() * pool.element_size()

    @property
    def num_host_blocks(self) -> int:
        return self._host.shape[0]

    @abstractmethod
    def to_host(self, transfers: Sequence[Transfer]) -> None:
        """Begin to copy device blocks to host blocks."""

    @abstractmethod
    def to_device(self, transfers: Sequence[Transfer]) -> None:
        """Begin to copy host blocks to device blocks."""

    @abstractmethod
    def before_compute(self, block_ids: Iterable[int]) -> None:
        """The steps from now on may read and write these device blocks: they wait for the copies that touch them."""

    @abstractmethod
    def finished(self, *, wait: bool) -> FinishedTransfers:
        """What has ended by now, or, with `wait`, all there is once it has ended."""

    def _count(self, direction: str, num_blocks: int) -> None:
        metrics.TRANSFERRED_BYTES.labels(direction).inc(num_blocks * self._block_bytes)


class CpuTransfers(BlockTransfers):
    """Device and host memory are the same kind; a copy has ended when the call returns."""

    def __init__(self, pool: Tensor, num_host_blocks: int) -> None:
        super().__init__(pool, torch.empty((num_host_blocks, *pool.shape[1:]), dtype=pool.dtype))
        self._finished: list[int] = []
        self._copy_s = 0.0

    def to_host(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._copy(transfer, self._host, transfer.host_ids, self._pool, transfer.device_ids)
            self._count("to_host", len(transfer.host_ids))

    def to_device(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self._copy(transfer, self._pool, transfer.device_ids, self._host, transfer.host_ids)
            self._count("to_device", len(transfer.host_ids))

    def _copy(
        self, transfer: Transfer, target: Tensor, target_ids: Sequence[int], source: Tensor, source_ids: Sequence[int]
    ) -> None:
        began = time.perf_counter()
        for target_id, source_id in zip(target_ids, source_ids, strict=True):
            target[target_id].copy_(source[source_id])
        self._copy_s += time.perf_counter() - began
        self._finished.append(transfer.transfer_id)

    def before_compute(self, block_ids: Iterable[int]) -> None:
        """Every copy has ended."""

    def finished(self, *, wait: bool) -> FinishedTransfers:
        done = FinishedTransfers(self._finished, int(self._copy_s * 1e6))
        self._finished, self._copy_s = [], 0.0
        return done


def new_transfers(pool: Tensor, num_host_blocks: int) -> BlockTransfers:
    """Host memory for the pool, and what copies on its kind of device."""
    if pool.device.type != "cuda":
        return CpuTransfers(pool, num_host_blocks)
    from octavo.worker.pinned_memory import pinned_zeros
    from octavo.worker.stream_transfers import CudaCopies, StreamTransfers

    host = pinned_zeros((num_host_blocks, *pool.shape[1:]), pool.dtype)
    return StreamTransfers(pool, host, CudaCopies(pool.device))
