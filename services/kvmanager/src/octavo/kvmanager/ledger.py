"""The ledger: whether the books of a pool agree with one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.common.block_hash import BlockKey
from octavo.common.messages.kv import PoolCounts
from octavo.kvmanager.block_state import BlockState
from octavo.kvmanager.host_ledger import HostBooks, host_books, judge_host
from octavo.kvmanager.pool import Pool
from octavo.kvmanager.transfers import Purpose

PAUSE_BLOCKS = 1024
"""Blocks that are looked at between two pauses."""


@dataclass(frozen=True, slots=True)
class Books:
    """What must agree, as of one moment: copies of flat lists, so that taking them is short."""

    states: list[BlockState]
    ref_counts: list[int]
    fences: list[int]
    keys: list[BlockKey | None]
    num_entries: int
    """Of the index."""
    acknowledged_step: int
    counts: PoolCounts
    free: list[int]
    granted: set[int]
    is_cached: bytes
    tables: list[tuple[int, list[int]]]
    """sequence |-> its blocks"""
    tails: list[int]
    """Device blocks that swapped tails hold."""
    moving: list[tuple[int, ...]]
    """Device blocks of open transfers that make them TRANSFERRING."""
    claims: list[str]
    """What is wrong with the claims."""
    host: HostBooks


def take_books(pool: Pool) -> Books:
    """Copy them, between two messages."""
    blocks, tier = pool.blocks, pool.tier
    return Books(
        states=blocks.states[:],
        ref_counts=blocks.ref_counts[:],
        fences=blocks.quarantine.fences[:],  # type: ignore[arg-type]  # an array, which is read like a list
        keys=blocks.keys[:],
        num_entries=len(blocks.key_to_block),
        acknowledged_step=blocks.quarantine.acknowledged_step,
        counts=blocks.counts(),
        free=blocks.free[:],
        granted=blocks.granted.copy(),
        is_cached=blocks.cached.members(),
        tables=[(sequence_id, table.block_ids[:]) for sequence_id, table in pool.tables],
        tails=[block.device_id for _, tail in tier.tails() for block in tail if block.device_id is not None],
        moving=[one.device_ids for one in tier.transfers if one.purpose is not Purpose.SINK],
        claims=_claim_violations(pool),
        host=host_books(tier),
    )


def violations(pool: Pool) -> list[str]:
    """Everything that does not add up, for people; empty if the pool is sound. Reads every block and table."""
    return [found for found in judge(take_books(pool), pool) if found is not None]


def judge(books: Books, pool: Pool) -> Iterator[str | None]:
    """What does not add up in the books. None is a pause: the caller may let others work, and the pool may change.

    The index is too large to be copied: each block is held against the pool's index as of its own moment.
    """
    yield from _state_violations(books)
    yield from _reference_violations(books)
    yield from _index_violations(books, pool)
    yield from judge_host(books.host)
    yield from books.claims


def _pauses(num_blocks: int) -> Iterator[tuple[int, int]]:
    """Ranges between which there is a pause."""
    for first in range(0, num_blocks, PAUSE_BLOCKS):
        yield first, min(first + PAUSE_BLOCKS, num_blocks)


def _state_violations(books: Books) -> Iterator[str | None]:
    """Each block is where its state says, once, and the counts are those of the states."""
    states, fences, acknowledged = books.states, books.fences, books.acknowledged_step
    is_free = bytearray(len(states))
    for first, end in _pauses(len(books.free)):
        for block_id in books.free[first:end]:
            if is_free[block_id]:
                yield f"block {block_id} is in the free list more than once"
            is_free[block_id] = True
        yield None
    by_state: Counter[BlockState] = Counter()
    for first, end in _pauses(len(states)):
        by_state.update(states[first:end])
        for block_id in range(first, end):
            state = states[block_id]
            for listed_state, is_listed in (
                (BlockState.FREE, is_free[block_id]),
                (BlockState.GRANTED, block_id in books.granted),
                (BlockState.CACHED, books.is_cached[block_id]),
            ):
                if bool(is_listed) != (state is listed_state):
                    yield f"block {block_id} is either marked or listed as {listed_state.name}, not both"
            is_closed = fences[block_id] > acknowledged
            if state is BlockState.QUARANTINED and not is_closed:
                yield f"block {block_id} is QUARANTINED, its fence {fences[block_id]} is acknowledged"
            if is_closed and state in (BlockState.FREE, BlockState.CACHED):
                yield f"block {block_id} is {state.name}, its fence {fences[block_id]} is not acknowledged"
        yield None
    for state in BlockState:
        told = getattr(books.counts, state.name.lower())
        if by_state[state] != told:
            yield f"{by_state[state]} blocks are {state.name}, {told} are counted"


def _reference_violations(books: Books) -> Iterator[str | None]:
    """Reference counts equal the tables and tails that list a block; only active blocks, and those that a copy fills,
    are in any, and once in each. A block is TRANSFERRING if one transfer moves it."""
    holders = [0] * len(books.states)
    for sequence_id, block_ids in books.tables:
        if len(set(block_ids)) != len(block_ids):
            yield f"sequence {sequence_id} lists a block twice"
        for block_id in block_ids:
            holders[block_id] += 1
        yield None
    for block_id in books.tails:
        holders[block_id] += 1
    moving = Counter(block_id for device_ids in books.moving for block_id in device_ids)
    yield None
    for first, end in _pauses(len(books.states)):
        for block_id in range(first, end):
            state, ref_count, num_holders = books.states[block_id], books.ref_counts[block_id], holders[block_id]
            if ref_count != num_holders:
                yield f"block {block_id} counts {ref_count} references and is in {num_holders} tables"
            if state is not BlockState.TRANSFERRING and (state is BlockState.ACTIVE) != (num_holders > 0):
                yield f"block {block_id} is {state.name} and in {num_holders} tables"
            if moving[block_id] != (state is BlockState.TRANSFERRING):
                yield f"block {block_id} is {state.name} and in {moving[block_id]} transfers"
        yield None


def _index_violations(books: Books, pool: Pool) -> Iterator[str | None]:
    """Each key has its entry, there are no other entries, and only filled blocks have keys."""
    blocks, num_keys = pool.blocks, 0
    for first, end in _pauses(len(books.keys)):
        for block_id in range(first, end):
            state, key = books.states[block_id], books.keys[block_id]
            num_keys += key is not None
            if key is None and state is BlockState.CACHED:
                yield f"block {block_id} is CACHED without a key"
            if key is not None and state in (BlockState.FREE, BlockState.GRANTED):
                yield f"block {block_id} is {state.name} and carries a key"
            present = blocks.keys[block_id]
            if present is not None and blocks.key_to_block.get(present) != block_id:
                yield f"block {block_id} carries a key that is not its entry"
        yield None
    if num_keys != books.num_entries:
        yield f"{num_keys} blocks carry a key, the index has {books.num_entries} entries"
        for entry, block_id in blocks.key_to_block.items():
            if blocks.keys[block_id] != entry:
                yield f"the entry {entry.hex()} points to block {block_id}, which does not carry it"


def _claim_violations(pool: Pool) -> list[str]:
    """A claim is on an unpublished full prompt block of the table of its sequence."""
    owed = {
        (key, sequence_id)
        for sequence_id, table in pool.tables
        if table.is_publishing
        for key in table.chain.keys[table.num_published_blocks : table.num_claimed_blocks]
    }
    return [
        f"sequence {sequence_id} claims block {key.hex()}, which it does not compute"
        for key, sequence_id in pool.tables.flights.items()
        if (key, sequence_id) not in owed
    ]
