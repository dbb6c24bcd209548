"""Looks at a pool without changing it: its map, its tables, its prefix tree, its ledger."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.common.block_hash import digest_of
from octavo.kvmanager.ledger import judge, take_books
from octavo.kvmanager.pool import Pool
from octavo.kvmanager.pool_events import EventKind, PoolEvent, Tier

_SLICE_S = 0.0005
"""How long the ledger's check keeps the event loop from other work at a time."""


@dataclass(frozen=True, slots=True)
class PoolMap:
    """A range of blocks, an entry for each."""

    first: int
    states: list[int]
    ref_counts: list[int]
    generations: list[int]
    owners: list[int]
    """A sequence whose table lists the block; 0 for none."""
    is_published: list[bool]


def pool_map(pool: Pool, first: int, num_blocks: int) -> PoolMap:
    """The blocks `first` to `first + num_blocks - 1`, as far as they exist."""
    blocks = pool.blocks
    end = min(first + num_blocks, blocks.num_blocks)
    owners: dict[int, int] = {}
    for sequence_id, table in pool.tables:
        owners.update(dict.fromkeys(table.block_ids, sequence_id))
    return PoolMap(
        first=first,
        states=[int(state) for state in blocks.states[first:end]],
        ref_counts=list(blocks.ref_counts[first:end]),
        generations=list(blocks.generations[first:end]),
        owners=[owners.get(block_id, 0) for block_id in range(first, end)],
        is_published=[key is not None for key in blocks.keys[first:end]],
    )


@dataclass(frozen=True, slots=True)
class TableView:
    """The table of one sequence."""

    sequence_id: int
    block_ids: list[int]
    num_known_tokens: int
    """Tokens that the manager has been told."""
    num_published_blocks: int


def tables_after(pool: Pool, sequence_id: int, max_blocks: int) -> list[TableView]:
    """Tables of the sequences above `sequence_id`, lowest first, up to `max_blocks` blocks in all; at least one."""
    found: list[TableView] = []
    num_blocks = 0
    for next_id, table in sorted(((key, table) for key, table in pool.tables if key > sequence_id), key=lambda t: t[0]):
        num_blocks += len(table.block_ids)
        if found and num_blocks > max_blocks:
            break
        found.append(TableView(next_id, list(table.block_ids), table.chain.num_tokens, table.num_published_blocks))
    return found


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A published block in the tree of prefixes."""

    block_id: int
    parent_id: int
    """The published block before it; -1 if it is the first of its prefix, or if that one is gone."""
    depth: int
    """Blocks before it; -1 if one of them is gone, so that it cannot be hit."""
    ref_count: int


def prefix_nodes(pool: Pool, first: int, max_nodes: int) -> tuple[list[PrefixNode], int]:
    """Nodes among the blocks from `first` on, lowest first, and the block to go on from (the pool's end if done)."""
    blocks = pool.blocks
    depths: dict[int, int] = {}
    nodes: list[PrefixNode] = []
    block_id = first
    while block_id < blocks.num_blocks and len(nodes) < max_nodes:
        if blocks.keys[block_id] is not None:
            parent_id = blocks.published_parent(block_id)
            depth = _depth(pool, block_id, depths)
            nodes.append(PrefixNode(block_id, parent_id, depth, blocks.ref_counts[block_id]))
        block_id += 1
    return nodes, block_id


def _depth(pool: Pool, block_id: int, depths: dict[int, int]) -> int:
    blocks = pool.blocks
    path = []
    while block_id >= 0 and block_id not in depths:
        path.append(block_id)
        block_id = blocks.published_parent(block_id)
    for member in reversed(path):
        parent_id = blocks.published_parent(member)
        if parent_id >= 0:
            depths[member] = depths[parent_id] + 1 if depths[parent_id] >= 0 else -1
        else:
            depths[member] = 0 if blocks.parents[member] is None else -1
    return depths[path[0]] if path else depths[block_id]


def stored_blocks(pool: Pool) -> Iterator[PoolEvent]:
    """Everything that can be found, as of the call, in either tier, as the events that would have led there."""
    blocks, host = pool.blocks, pool.tier.host
    on_device = _as_events(Tier.DEVICE, list(blocks.keys), list(blocks.parents))
    return itertools.chain(on_device, _as_events(Tier.HOST, list(host.keys), list(host.parents)))


def _as_events(tier: Tier, keys: list[Any], parents: list[Any]) -> Iterator[PoolEvent]:
    for block_id, key in enumerate(keys):
        if key is not None:
            parent = parents[block_id]
            parent_digest = digest_of(parent) if parent is not None else b""
            yield PoolEvent(EventKind.STORED, tier, block_id, digest_of(key), parent_digest)


async def ledger_violations(pool: Pool) -> list[str]:
    """What does not add up, as of the call. The books are copied at once, and judged in slices between which the event
    loop has its turn."""
    found: list[str] = []
    slice_ends = time.perf_counter() + _SLICE_S
    for violation in judge(take_books(pool), pool):
        if violation is not None:
            found.append(violation)
        elif time.perf_counter() >= slice_ends:
            await asyncio.sleep(0)
            slice_ends = time.perf_counter() + _SLICE_S
    return found
