"""Checks the transfers of a plan before any of it runs, and makes them in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from octavo.common.errors import ProtocolError, StaleBlockError
from octavo.common.messages.kv import BlockCopy, Transfer, TransferDirection
from octavo.common.messages.step import StepPlan
from octavo.worker.block_tables import BlockTables


class BlockMover(Protocol):
    """Begins transfers between device and host."""

    def to_host(self, transfers: Sequence[Transfer]) -> None:
        """Begin to copy device blocks to host blocks."""

    def before_compute(self, block_ids: Iterable[int]) -> None:
        """The steps from now on may read and write these device blocks: they wait for the copies that touch them."""

    def to_device(self, transfers: Sequence[Transfer]) -> None:
        """Begin to copy host blocks to device blocks."""


def check_transfers(plan: StepPlan, tables: BlockTables, num_host_blocks: int) -> None:
    """Raises StaleBlockError by the rule of generations, ProtocolError for blocks that do not exist or come twice.

    A block that goes to the host is looked at as it is before the plan's deltas. One that is filled may stand in no
    live table.
    """
    if not plan.transfers:
        return
    cleared = set(plan.closed_slots)
    given = {block_id for delta in plan.table_deltas for block_id in delta.block_ids}
    for transfer in plan.transfers:
        _check_shape(transfer, tables.num_blocks, num_host_blocks)
        for block_id, generation in zip(transfer.device_ids, transfer.generations, strict=True):
            known = tables.generation(block_id)
            if generation < known:
                raise StaleBlockError(
                    f"transfer {transfer.transfer_id} names block {block_id} at generation {generation}, after {known}"
                )
            is_filled = transfer.direction is TransferDirection.TO_DEVICE
            if is_filled and (block_id in given or tables.is_listed(block_id, cleared)):
                raise StaleBlockError(
                    f"transfer {transfer.transfer_id} fills block {block_id}, which stands in a live table"
                )


def move_blocks(
    plan: StepPlan,
    transfers: BlockMover,
    tables: BlockTables,
    copy_blocks: Callable[[Sequence[BlockCopy]], None],
) -> None:
    """Begin the plan's transfers and make its copies, in their order. The plan has been checked, its deltas applied."""
    to_device = [one for one in plan.transfers if one.direction is TransferDirection.TO_DEVICE]
    transfers.to_host([one for one in plan.transfers if one.direction is TransferDirection.TO_HOST])
    copied_ids = [block_id for copy in plan.copies for block_id in (copy.source_id, copy.target_id)]
    transfers.before_compute(chain(copied_ids, *(delta.block_ids for delta in plan.table_deltas)))
    copy_blocks(plan.copies)
    transfers.to_device(to_device)
    for transfer in to_device:
        for block_id, generation in zip(transfer.device_ids, transfer.generations, strict=True):
            tables.renew(block_id, generation)


def independent_copies(copies: Iterable[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """All copies in order; those come together of which none touches a block of another."""
    together: list[BlockCopy] = []
    touched: set[int] = set()
    for copy in copies:
        if touched & {copy.source_id, copy.target_id}:
            yield together
            together, touched = [], set()
        together.append(copy)
        touched |= {copy.source_id, copy.target_id}
    if together:
        yield together


def _check_shape(transfer: Transfer, num_blocks: int, num_host_blocks: int) -> None:
    name = f"transfer {transfer.transfer_id}"
    if not len(transfer.device_ids) == len(transfer.generations) == len(transfer.host_ids):
        raise ProtocolError(f"the arrays of {name} differ in length")
    _check_ids(f"{name}: device block", transfer.device_ids, num_blocks)
    _check_ids(f"{name}: host block", transfer.host_ids, num_host_blocks)


def _check_ids(name: str, block_ids: Sequence[int], num_blocks: int) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise ProtocolError(f"{name} {block_id} is not one of {num_blocks}")
    if len(set(block_ids)) < len(block_ids):
        raise ProtocolError(f"{name}s come twice")
