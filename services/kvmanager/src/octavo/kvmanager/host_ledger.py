"""The ledger of host memory: whether its books agree with one another and with those of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.common.block_hash import BlockKey
from octavo.kvmanager.host_pool import HostState
from octavo.kvmanager.host_tier import HostTier
from octavo.kvmanager.transfers import Purpose

PAUSE_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class HostBooks:
    """What must agree, as of one moment."""

    states: list[HostState]
    free: list[int]
    keys: list[BlockKey | None]
    key_to_block: dict[BlockKey, int]
    evictable: set[int]
    num_transfers: list[int]
    holders: Counter[int]
    """Tails, given-up blocks and sinking transfers that hold each block."""
    uses: Counter[int]
    """Transfers that read or write each block."""


def host_books(tier: HostTier) -> HostBooks:
    """Copy them, between two messages."""
    host = tier.host
    holders = Counter(block.host_id for _, tail in tier.tails() for block in tail if block.host_id is not None)
    holders.update(host.given_up)
    uses: Counter[int] = Counter()
    for transfer in tier.transfers:
        uses.update(transfer.host_ids)
        if transfer.purpose is Purpose.SINK:
            holders.update(transfer.host_ids)
    return HostBooks(
        states=host.states[:],
        free=host.free[:],
        keys=host.keys[:],
        key_to_block=host.key_to_block.copy(),
        evictable=set(host.evictable),
        num_transfers=host.num_transfers[:],
        holders=holders,
        uses=uses,
    )


def judge_host(books: HostBooks) -> Iterator[str | None]:
    """Everything that does not add up, for people. None is a pause, in which others may work.

    A block is where its state says. A swapped one has one holder: a tail, the transfer that fills it, or one that it
    was given up to. Each key has its entry. Both ends of each transfer are held, and nothing else is.
    """
    is_free = bytearray(len(books.states))
    for block_id in books.free:
        if is_free[block_id]:
            yield f"host block {block_id} is in the free list more than once"
        is_free[block_id] = True
    yield None
    for block_id, state in enumerate(books.states):
        if bool(is_free[block_id]) != (state is HostState.FREE):
            yield f"host block {block_id} is either marked or listed as FREE, not both"
        is_idle = state is HostState.CACHED and not books.num_transfers[block_id]
        if is_idle != (block_id in books.evictable):
            yield f"host block {block_id} is either idle or evictable, not both"
        if books.holders[block_id] != (state is HostState.SWAPPED):
            yield f"host block {block_id} is {state.name} and has {books.holders[block_id]} holders"
        key = books.keys[block_id]
        if (key is not None) != (state is HostState.CACHED):
            yield f"host block {block_id} is {state.name}, its key says otherwise"
        if key is not None and books.key_to_block.get(key) != block_id:
            yield f"host block {block_id} carries a key that is not its entry"
        if books.num_transfers[block_id] != books.uses[block_id]:
            yield (
                f"host block {block_id} counts {books.num_transfers[block_id]} transfers and is in"
                f" {books.uses[block_id]}"
            )
        if block_id % PAUSE_BLOCKS == 0:
            yield None
    if len(books.key_to_block) != sum(key is not None for key in books.keys):
        yield f"the host index has {len(books.key_to_block)} entries, which are not those of its blocks"
