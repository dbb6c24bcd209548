"""Rebuilds a pool from what its scheduler holds, after the manager that kept it is gone."""

from __future__ import annotations

from collections import Counter

from octavo.common.block_hash import BlockHasher, TokenChain
from octavo.common.codecs.arrays import pack_int32
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import DeclarePool
from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.block_table import BlockTables


def rebuild(blocks: BlockPool, tables: BlockTables, hasher: BlockHasher, declared: DeclarePool) -> None:
    """Make a pool in which nobody holds a block the one that was declared.

    Declared tables hold their blocks, declared credits are granted, and every other block is quarantined until the last
    step launched is acknowledged, for it may be written by steps on their way. What the pool knows blocks to hold can
    still be found, and the full computed blocks of the tables are published.

    Raises ProtocolError if a block is declared twice in a way that cannot be.
    """
    holders = Counter(block_id for table in declared.tables for block_id in table.block_ids)
    granted = {block_id for block_id, _ in declared.credits}
    generations = _declared_generations(declared, blocks.num_blocks)
    if len(granted) < len(declared.credits) or not granted.isdisjoint(holders):
        raise ProtocolError("a declared credit is declared again, or stands in a table")
    _note_generations(blocks, declared, generations)
    blocks.acknowledge(declared.acknowledged_step)
    blocks.take_over(holders, granted, declared.launched_step)
    for table in declared.tables:
        chain = TokenChain(hasher, pack_int32(table.token_ids), table.salt, table.adapter, table.adapter_generation)
        tables.take_over(table.sequence_id, table.block_ids, chain, table.num_computed_tokens)


def _declared_generations(declared: DeclarePool, num_blocks: int) -> dict[int, int]:
    """block_id |-> generation, of every block that is named."""
    generations: dict[int, int] = {}

    def note(block_id: int, generation: int) -> None:
        if not 0 <= block_id < num_blocks:
            raise ProtocolError(f"block {block_id} is declared, which is not one of {num_blocks}")
        if generations.setdefault(block_id, generation) != generation:
            raise ProtocolError(f"block {block_id} is declared at generations {generations[block_id]} and {generation}")

    for table in declared.tables:
        if len(table.block_ids) != len(table.generations) or len(set(table.block_ids)) != len(table.block_ids):
            raise ProtocolError(f"the declared table of sequence {table.sequence_id} is no table")
        for block_id, generation in zip(table.block_ids, table.generations, strict=True):
            note(block_id, generation)
    for block_id, generation in [*declared.credits, *declared.recycled]:
        note(block_id, generation)
    return generations


def _note_generations(blocks: BlockPool, declared: DeclarePool, generations: dict[int, int]) -> None:
    """No block falls behind what the worker may have seen of it. The pool is believed where it knows what a block
    holds: without that, its generation may be from before the scheduler's time."""
    for block_id, key in enumerate(blocks.keys):
        if key is None:
            blocks.generations[block_id] = max(blocks.generations[block_id], declared.highest_generation)
    for block_id, generation in generations.items():
        blocks.note_generation(block_id, generation)
