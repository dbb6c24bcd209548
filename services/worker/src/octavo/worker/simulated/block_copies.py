"""When transfers between device and host end, on a link with one lane each way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.common.messages.kv import Transfer, TransferDirection
from octavo.worker.runner import NO_TRANSFERS, FinishedTransfers


@dataclass(frozen=True, slots=True)
class _Copy:
    transfer: Transfer
    began: float
    end: float


class BlockCopies:
    """Copies begin after the steps before them; steps that are given a block wait for the copies that touch it."""

    def __init__(self, block_seconds: float) -> None:
        """`block_seconds`: time of one block on the link."""
        self._block_seconds = block_seconds
        self._running: list[_Copy] = []
        self._free_at = dict.fromkeys(TransferDirection, 0.0)
        self.now = 0.0
        """The end of the steps so far."""
        self.compute_after = 0.0
        """When the next step may begin, as `before_compute` has found."""

    def forget(self) -> None:
        """What is on its way counts as ended."""
        self._running = []

    def to_host(self, transfers: Sequence[Transfer]) -> None:
        """See BlockMover."""
        self._begin(transfers)

    def before_compute(self, block_ids: Iterable[int]) -> None:
        """See BlockMover."""
        self.compute_after = self.now
        if self._running:
            given = set(block_ids)
            touching = (copy.end for copy in self._running if not given.isdisjoint(copy.transfer.device_ids))
            self.compute_after = max([self.now, *touching])

    def to_device(self, transfers: Sequence[Transfer]) -> None:
        """See BlockMover."""
        self._begin(transfers)

    def _begin(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            touching = (copy.end for copy in self._running if _share_blocks(copy.transfer, transfer))
            began = max(self.now, self._free_at[transfer.direction], *touching)
            end = began + len(transfer.device_ids) * self._block_seconds
            self._free_at[transfer.direction] = end
            self._running.append(_Copy(transfer, began, end))

    @property
    def end_of_all(self) -> float:
        """When the last copy ends; `now` without any."""
        return max((copy.end for copy in self._running), default=self.now)

    def finished(self, by: float) -> FinishedTransfers:
        """What has ended by then, once."""
        if not self._running:
            return NO_TRANSFERS
        done = [copy for copy in self._running if copy.end <= by]
        self._running = [copy for copy in self._running if copy.end > by]
        seconds = sum(copy.end - copy.began for copy in done)
        return FinishedTransfers([copy.transfer.transfer_id for copy in done], int(seconds * 1e6))


def _share_blocks(one: Transfer, other: Transfer) -> bool:
    return not (set(one.host_ids).isdisjoint(other.host_ids) and set(one.device_ids).isdisjoint(other.device_ids))
