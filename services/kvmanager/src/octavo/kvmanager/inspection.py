"""Looks at a pool without changing it: its map, its tables, its prefix tree, its ledger."""

from __future__ import annotations

import asyncio
import copy
import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from octavo.kvmanager.block_hash import TokenChain, digest_of
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool
from octavo.kvmanager.pool_events import EventKind, PoolEvent, PoolEvents, Tier
from octavo.kvmanager.stats import KvStats

_SWITCH_INTERVAL_S = 0.0005
"""How long the ledger's thread may keep the interpreter from the event loop."""


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
    """What does not add up, as of the call. The books are copied at once, and checked in a thread that gives way."""
    snapshot = _Copier().copy(pool)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, _SWITCH_INTERVAL_S))
    try:
        return await asyncio.to_thread(violations, snapshot)
    finally:
        sys.setswitchinterval(interval)


class _Copier:
    """Copies the books of a pool: its own objects and their containers, not what the containers hold, unless these
    are books themselves. What two of them share stays shared."""

    _CONTAINERS = (list, dict, set, OrderedDict, deque)
    _NOT_BOOKS = (TokenChain, KvStats, PoolEvents)

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}

    def copy(self, original: Any) -> Any:
        known = self._copies.get(id(original))
        if known is not None:
            return known
        if type(original).__module__ == "array":
            made = original[:]
        elif isinstance(original, self._CONTAINERS):
            made = copy.copy(original)
            self._copies[id(original)] = made
            if isinstance(made, dict) and self._is_book(next(iter(made.values()), None)):
                for key, value in made.items():
                    made[key] = self.copy(value)
        elif self._is_book(original):
            made = copy.copy(original)
            self._copies[id(original)] = made
            for name in _attributes(made):
                object.__setattr__(made, name, self.copy(getattr(made, name)))
        else:
            return original
        self._copies[id(original)] = made
        return made

    def _is_book(self, value: Any) -> bool:
        """An object of this service with books in it."""
        kind = type(value)
        is_ours = kind.__module__.startswith("octavo.kvmanager.")
        has_attributes = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
        return is_ours and has_attributes and not isinstance(value, (*self._NOT_BOOKS, int, tuple))


def _attributes(book: Any) -> list[str]:
    slots = [name for base in type(book).__mro__ for name in getattr(base, "__slots__", ()) if hasattr(book, name)]
    return [*slots, *getattr(book, "__dict__", {})]
