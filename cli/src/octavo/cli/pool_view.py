"""Reads everything about one block pool from its KV manager."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from octavo.common.codecs.arrays import unpack_int32
from octavo.common.links import Address, TlsFiles, open_channel
from octavo.common.roles import Role
from octavo.v1 import kvmanager_service_pb2 as pb
from octavo.v1 import kvmanager_service_pb2_grpc as pb_grpc

STATES = ("free", "granted", "active", "cached", "quarantined", "transferring")
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Table:
    """The table of one sequence."""

    sequence_id: int
    block_ids: list[int]
    num_known_tokens: int
    num_published_blocks: int


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A published block. See PrefixNode of the KV manager."""

    block_id: int
    parent_id: int
    depth: int
    ref_count: int


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool as it was while it was read; pages are each of their own moment."""

    pool_id: str
    num_blocks: int
    block_size: int
    counts: dict[str, int]
    states: bytes  # [num_blocks] |-> place in STATES
    ref_counts: list[int]  # [num_blocks]
    tables: list[Table]
    prefixes: list[PrefixNode]
    violations: list[str]

    def shared_by(self) -> Counter[int]:
        """How many blocks are in how many tables, of those in more than one."""
        return Counter(count for count in self.ref_counts if count > 1)


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """A pool in a few numbers."""

    num_blocks: int
    counts: dict[str, int]
    """Blocks by state."""
    num_lookup_tokens: int
    """Prompt tokens that were looked up in the prefix cache, since the KV manager started."""
    num_hit_tokens: int
    """Of these, found."""


async def read_figures(address: Address, pool_id: str, tls: TlsFiles | None = None) -> PoolFigures:
    """Raises grpc.aio.AioRpcError if the KV manager does not answer, or has no such pool."""
    async with open_channel(address.grpc_target, Role.KVMANAGER, tls) as channel:
        stub: Any = pb_grpc.KvManagerServiceStub(channel)
        asked = pb.InspectPoolRequest(pool_id=pool_id, skip_ledger=True)
        pool = await stub.InspectPool(asked, timeout=_TIMEOUT_S)
    totals = pool.totals
    return PoolFigures(pool.num_blocks, _counts(pool), totals.prefix_lookup_tokens, totals.prefix_hit_tokens)


async def read_pool(address: Address, pool_id: str, tls: TlsFiles | None = None) -> PoolView:
    """Raises grpc.aio.AioRpcError if the KV manager does not answer, or has no such pool."""
    async with open_channel(address.grpc_target, Role.KVMANAGER, tls) as channel:
        stub: Any = pb_grpc.KvManagerServiceStub(channel)
        pool = await stub.InspectPool(pb.InspectPoolRequest(pool_id=pool_id), timeout=_TIMEOUT_S)
        states, ref_counts = b"", list[int]()
        while len(states) < pool.num_blocks:
            asked = pb.GetPoolMapRequest(pool_id=pool.pool_id, first_block=len(states))
            page = await stub.GetPoolMap(asked, timeout=_TIMEOUT_S)
            states += page.states
            ref_counts += unpack_int32(page.ref_counts)
        return PoolView(
            pool_id=pool.pool_id,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            counts=_counts(pool),
            states=states,
            ref_counts=ref_counts,
            tables=await _tables(stub, pool.pool_id),
            prefixes=await _prefixes(stub, pool.pool_id),
            violations=list(pool.violations),
        )


def _counts(pool: pb.InspectPoolResponse) -> dict[str, int]:
    return {field.name: getattr(pool.counts, field.name) for field in pool.counts.DESCRIPTOR.fields}


async def _tables(stub: Any, pool_id: str) -> list[Table]:
    tables: list[Table] = []
    has_more = True
    while has_more:
        last = tables[-1].sequence_id if tables else 0
        page = await stub.ListTables(pb.ListTablesRequest(pool_id=pool_id, after_sequence_id=last), timeout=_TIMEOUT_S)
        for table in page.tables:
            block_ids = unpack_int32(table.block_ids)
            tables.append(Table(table.sequence_id, block_ids, table.num_known_tokens, table.num_published_blocks))
        has_more = page.has_more
    return tables


async def _prefixes(stub: Any, pool_id: str) -> list[PrefixNode]:
    nodes: list[PrefixNode] = []
    first = 0
    while True:
        page = await stub.ListPrefixes(pb.ListPrefixesRequest(pool_id=pool_id, first_block=first), timeout=_TIMEOUT_S)
        columns = (page.block_ids, page.parent_ids, page.depths, page.ref_counts)
        nodes += [PrefixNode(*row) for row in zip(*map(unpack_int32, columns), strict=True)]
        first = page.next_block
        if not first:
            return nodes
