"""The ledger of host memory: whether its books agree with one another and with those of the device."""

from __future__ import annotations

from collections import Counter

from octavo.kvmanager.block_pool import BlockState
from octavo.kvmanager.host_pool import HostPool, HostState
from octavo.kvmanager.host_tier import HostTier
from octavo.kvmanager.pool import Pool
from octavo.kvmanager.transfers import Purpose


def host_violations(pool: Pool) -> list[str]:
    """Everything that does not add up, for people; empty if host memory is sound. Reads every block."""
    return [
        *_state_violations(pool.tier.host),
        *_holder_violations(pool.tier),
        *_index_violations(pool.tier.host),
        *_transfer_violations(pool),
    ]


def _state_violations(host: HostPool) -> list[str]:
    found = []
    marked = {state: {h for h, one in enumerate(host.states) if one is state} for state in HostState}
    if sorted(host.free) != sorted(marked[HostState.FREE]):
        found.append(f"host blocks {sorted(marked[HostState.FREE] ^ set(host.free))} are FREE or listed, not both")
    if marked[HostState.CACHED] != set(host.key_to_block.values()):
        found.append("the cached host blocks are not those of the index")
    idle = {host_id for host_id in marked[HostState.CACHED] if not host.num_transfers[host_id]}
    if idle != set(host.evictable):
        found.append(f"host blocks {sorted(idle ^ set(host.evictable))} are either idle or evictable, not both")
    return found


def _holder_violations(tier: HostTier) -> list[str]:
    """A swapped block has one holder: a tail, the transfer that fills it, or one that it was given up to."""
    host = tier.host
    holders = Counter(block.host_id for _, tail in tier.tails() for block in tail if block.host_id is not None)
    holders.update(host.given_up)
    holders.update(
        host_id for transfer in tier.transfers if transfer.purpose is Purpose.SINK for host_id in transfer.host_ids
    )
    found = []
    for host_id, state in enumerate(host.states):
        if holders[host_id] != (state is HostState.SWAPPED):
            found.append(f"host block {host_id} is {state.name} and has {holders[host_id]} holders")
    return found


def _index_violations(host: HostPool) -> list[str]:
    found = []
    for key, host_id in host.key_to_block.items():
        if host.keys[host_id] != key:
            found.append(f"the host entry {key.hex()} points to block {host_id}, which does not carry it")
    for host_id, own_key in enumerate(host.keys):
        if (own_key is not None) != (host.states[host_id] is HostState.CACHED):
            found.append(f"host block {host_id} is {host.states[host_id].name}, its key says otherwise")
    return found


def _transfer_violations(pool: Pool) -> list[str]:
    """Both ends of each transfer are held, and nothing else is."""
    uses: Counter[int] = Counter()
    moving: Counter[int] = Counter()
    found = []
    for transfer in pool.tier.transfers:
        uses.update(transfer.host_ids)
        if transfer.purpose is not Purpose.SINK:
            moving.update(transfer.device_ids)
    for host_id, count in enumerate(pool.tier.host.num_transfers):
        if count != uses[host_id]:
            found.append(f"host block {host_id} counts {count} transfers and is in {uses[host_id]}")
    for block_id, state in enumerate(pool.blocks.states):
        if moving[block_id] != (state is BlockState.TRANSFERRING):
            found.append(f"block {block_id} is {state.name} and in {moving[block_id]} transfers")
    return found
