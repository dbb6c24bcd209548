"""The ledger: whether the books of a pool agree with one another."""

from __future__ import annotations

from collections import Counter

from octavo.kvmanager.block_pool import BlockPool, BlockState
from octavo.kvmanager.host_ledger import host_violations
from octavo.kvmanager.pool import Pool


def violations(pool: Pool) -> list[str]:
    """Everything that does not add up, for people; empty if the pool is sound. Reads every block and table."""
    blocks = pool.blocks
    return [
        *_state_violations(blocks),
        *_reference_violations(pool),
        *_index_violations(blocks),
        *host_violations(pool),
        *_claim_violations(pool),
    ]


def _state_violations(blocks: BlockPool) -> list[str]:
    """Each block is where its state says, once, and the counts are those of the states."""
    found = []
    if len(blocks.free) != len(set(blocks.free)):
        twice = sorted(block_id for block_id, times in Counter(blocks.free).items() if times > 1)
        found.append(f"blocks {twice} are in the free list more than once")
    members = {
        BlockState.FREE: set(blocks.free),
        BlockState.GRANTED: blocks.granted,
        BlockState.CACHED: set(blocks.cached),
    }
    for state, listed in members.items():
        marked = {block_id for block_id, marked_state in enumerate(blocks.states) if marked_state is state}
        if marked != listed:
            found.append(f"blocks {sorted(marked ^ listed)} are either marked or listed as {state.name}, not both")
    by_state, counts = Counter(blocks.states), blocks.counts()
    for state in BlockState:
        told = getattr(counts, state.name.lower())
        if by_state[state] != told:
            found.append(f"{by_state[state]} blocks are {state.name}, {told} are counted")
    for block_id, state in enumerate(blocks.states):
        if state is BlockState.QUARANTINED and blocks.fences[block_id] <= blocks.acknowledged_step:
            found.append(f"block {block_id} is QUARANTINED, its fence {blocks.fences[block_id]} is acknowledged")
        if state in (BlockState.FREE, BlockState.CACHED) and blocks.fences[block_id] > blocks.acknowledged_step:
            found.append(f"block {block_id} is {state.name}, its fence {blocks.fences[block_id]} is not acknowledged")
    return found


def _reference_violations(pool: Pool) -> list[str]:
    """Reference counts equal the tables and tails that list a block; only active blocks, and those that a copy fills,
    are in any, and once in each."""
    blocks = pool.blocks
    holders: Counter[int] = Counter()
    found = []
    for sequence_id, table in pool.tables:
        if len(set(table.block_ids)) != len(table.block_ids):
            found.append(f"sequence {sequence_id} lists a block twice")
        holders.update(table.block_ids)
    for _, tail in pool.tier.tails():
        holders.update(block.device_id for block in tail if block.device_id is not None)
    for block_id, state in enumerate(blocks.states):
        ref_count = blocks.ref_counts[block_id]
        if ref_count != holders[block_id]:
            found.append(f"block {block_id} counts {ref_count} references and is in {holders[block_id]} tables")
        if state is not BlockState.TRANSFERRING and (state is BlockState.ACTIVE) != (holders[block_id] > 0):
            found.append(f"block {block_id} is {state.name} and in {holders[block_id]} tables")
    return found


def _index_violations(blocks: BlockPool) -> list[str]:
    """Each entry points to a block that carries the key, each key has its entry, and only filled blocks have keys."""
    found = []
    for entry, block_id in blocks.key_to_block.items():
        if blocks.keys[block_id] != entry:
            found.append(f"the entry {entry.hex()} points to block {block_id}, which does not carry it")
    for block_id, key in enumerate(blocks.keys):
        if key is None:
            if blocks.states[block_id] is BlockState.CACHED:
                found.append(f"block {block_id} is CACHED without a key")
            continue
        if blocks.key_to_block.get(key) != block_id:
            found.append(f"block {block_id} carries a key that is not its entry")
        if blocks.states[block_id] in (BlockState.FREE, BlockState.GRANTED):
            found.append(f"block {block_id} is {blocks.states[block_id].name} and carries a key")
    return found


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
