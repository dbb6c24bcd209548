"""The calls of the KV manager beside the stream of steps. See proto/octavo/v1/kvmanager_service.proto."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import structlog

from octavo.common.codecs.arrays import pack_int32, pack_int64
from octavo.common.codecs.kv_reply import counts_to_proto
from octavo.common.errors import OverloadedLinkError
from octavo.kvmanager.event_stream import Batch, follow
from octavo.kvmanager.flush import FlushScope
from octavo.kvmanager.inspection import ledger_violations, pool_map, prefix_nodes, tables_after
from octavo.kvmanager.pool import Pool
from octavo.kvmanager.pool_watch import PoolFrame, watch_pool
from octavo.kvmanager.server import KvManagerServer
from octavo.kvmanager.stats import KvStats
from octavo.v1 import kvmanager_service_pb2 as pb

log = structlog.get_logger()

MAX_BLOCKS = 16_384
"""Blocks in one answer."""
MAX_NODES = 2_048
"""Nodes of the prefix tree in one answer."""
MAX_POOL_WATCHERS = 4
"""Each costs a look at the whole pool."""
_WATCH_INTERVAL_MS = (100, 250, 10_000)
"""Least, default and most."""
_WRITE_TIMEOUT_S = 10.0
"""For a watcher to take one batch."""


class KvManagerServicer:
    """Answers for the pools of one server."""

    def __init__(self, server: KvManagerServer) -> None:
        self._server = server
        self._num_pool_watchers = 0

    async def InspectPool(self, request: pb.InspectPoolRequest, context: Any) -> pb.InspectPoolResponse:
        """See kvmanager_service.proto."""
        pool = await self._pool(request.pool_id, context)
        response = pb.InspectPoolResponse(
            pool_id=pool.pool_id,
            counts=counts_to_proto(pool.counts()),
            num_sequences=len(pool.tables),
            num_blocks=pool.blocks.num_blocks,
            block_size=pool.block_size,
            life=pool.blocks.events.life,
            acknowledged_step=pool.blocks.quarantine.acknowledged_step,
            hash_algorithm=self._server.hash_algorithm,
            hash_root=pool.hasher.root,
            totals=_totals_to_proto(pool.stats),
        )
        if not request.skip_ledger:
            response.violations.extend(await ledger_violations(pool))
        return response

    async def GetPoolMap(self, request: pb.GetPoolMapRequest, context: Any) -> pb.GetPoolMapResponse:
        """See kvmanager_service.proto."""
        pool = await self._pool(request.pool_id, context)
        found = pool_map(pool, request.first_block, min(request.num_blocks or MAX_BLOCKS, MAX_BLOCKS))
        return pb.GetPoolMapResponse(
            first_block=request.first_block,
            num_blocks=pool.blocks.num_blocks,
            states=bytes(found.states),
            ref_counts=pack_int32(found.ref_counts),
            generations=pack_int32(found.generations),
            owners=pack_int64(found.owners),
            is_published=bytes(found.is_published),
        )

    async def ListTables(self, request: pb.ListTablesRequest, context: Any) -> pb.ListTablesResponse:
        """See kvmanager_service.proto."""
        pool = await self._pool(request.pool_id, context)
        tables = tables_after(pool, request.after_sequence_id, MAX_BLOCKS)
        return pb.ListTablesResponse(
            tables=[
                pb.SequenceTable(
                    sequence_id=table.sequence_id,
                    block_ids=pack_int32(table.block_ids),
                    num_known_tokens=table.num_known_tokens,
                    num_published_blocks=table.num_published_blocks,
                )
                for table in tables
            ],
            has_more=bool(tables) and any(sequence_id > tables[-1].sequence_id for sequence_id, _ in pool.tables),
        )

    async def ListPrefixes(self, request: pb.ListPrefixesRequest, context: Any) -> pb.ListPrefixesResponse:
        """See kvmanager_service.proto."""
        pool = await self._pool(request.pool_id, context)
        nodes, next_block = prefix_nodes(pool, request.first_block, MAX_NODES)
        return pb.ListPrefixesResponse(
            block_ids=pack_int32([node.block_id for node in nodes]),
            parent_ids=pack_int32([node.parent_id for node in nodes]),
            depths=pack_int32([node.depth for node in nodes]),
            ref_counts=pack_int32([node.ref_count for node in nodes]),
            next_block=next_block if next_block < pool.blocks.num_blocks else 0,
        )

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> None:
        """See kvmanager_service.proto."""
        pool_id = (await self._pool(request.pool_id, context)).pool_id
        batches = follow(lambda: self._server.find_pool(pool_id), request.life, request.after)
        try:
            async for batch in batches:
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await context.write(_batch_to_proto(batch))
        except OverloadedLinkError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        except TimeoutError:
            message = f"nothing was read for {_WRITE_TIMEOUT_S} s"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)

    async def WatchPool(self, request: pb.WatchPoolRequest, context: Any) -> None:
        """See kvmanager_service.proto."""
        pool_id = (await self._pool(request.pool_id, context)).pool_id
        if self._num_pool_watchers >= MAX_POOL_WATCHERS:
            message = f"{MAX_POOL_WATCHERS} watch already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        least, default, most = _WATCH_INTERVAL_MS
        interval_ms = min(max(request.interval_ms or default, least), most)
        self._num_pool_watchers += 1
        try:
            async for frame in watch_pool(lambda: self._server.find_pool(pool_id), interval_ms / 1000):
                async with asyncio.timeout(_WRITE_TIMEOUT_S):
                    await context.write(_frame_to_proto(frame))
        except TimeoutError:
            message = f"nothing was read for {_WRITE_TIMEOUT_S} s"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        finally:
            self._num_pool_watchers -= 1

    async def FlushPrefixCache(self, request: pb.FlushPrefixCacheRequest, context: Any) -> pb.FlushPrefixCacheResponse:
        """See kvmanager_service.proto. On the event loop: 40 ms for a pool of 55,712 blocks."""
        pool = await self._pool(request.pool_id, context)
        flushed = pool.flush(
            FlushScope(
                salt=request.salt if request.HasField("salt") else None,
                adapter=request.adapter if request.HasField("adapter") else None,
            )
        )
        log.info("prefix cache flushed", pool_id=pool.pool_id, freed=flushed.num_freed_blocks)
        return pb.FlushPrefixCacheResponse(
            num_freed_blocks=flushed.num_freed_blocks,
            num_used_blocks=flushed.num_used_blocks,
            num_sequences=flushed.num_sequences,
        )

    async def _pool(self, pool_id: str, context: Any) -> Pool:
        pool = self._server.find_pool(pool_id)
        if pool is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, self._why_no_pool(pool_id))
            raise AssertionError("abort raises")
        return pool

    def _why_no_pool(self, pool_id: str) -> str:
        names = ", ".join(sorted(pool.pool_id for pool in self._server.pools))
        if not names:
            return "no pool is open yet: no scheduler has come"
        return f"no pool {pool_id!r} is open, but {names}" if pool_id else f"name one of the pools: {names}"

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add these calls alone: the link layer serves the stream of steps."""
        unary: list[tuple[Any, Any, Any]] = [
            (self.InspectPool, pb.InspectPoolRequest, pb.InspectPoolResponse),
            (self.GetPoolMap, pb.GetPoolMapRequest, pb.GetPoolMapResponse),
            (self.ListTables, pb.ListTablesRequest, pb.ListTablesResponse),
            (self.ListPrefixes, pb.ListPrefixesRequest, pb.ListPrefixesResponse),
            (self.FlushPrefixCache, pb.FlushPrefixCacheRequest, pb.FlushPrefixCacheResponse),
        ]
        handlers = {
            method.__name__: grpc.unary_unary_rpc_method_handler(
                method, request_deserializer=asked.FromString, response_serializer=answer.SerializeToString
            )
            for method, asked, answer in unary
        }
        streams: list[tuple[Any, Any, Any]] = [
            (self.WatchEvents, pb.WatchEventsRequest, pb.EventBatch),
            (self.WatchPool, pb.WatchPoolRequest, pb.PoolFrame),
        ]
        for method, asked, answer in streams:
            handlers[method.__name__] = grpc.unary_stream_rpc_method_handler(
                method, request_deserializer=asked.FromString, response_serializer=answer.SerializeToString
            )
        service = pb.DESCRIPTOR.services_by_name["KvManagerService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _batch_to_proto(batch: Batch) -> pb.EventBatch:
    return pb.EventBatch(
        life=batch.life,
        last=batch.last,
        is_snapshot=batch.is_snapshot,
        has_more=batch.has_more,
        events=[
            pb.PoolEvent(
                kind=cast("pb.EventKind.ValueType", int(event.kind)),
                tier=cast("pb.Tier.ValueType", int(event.tier)),
                block_id=event.block_id,
                digest=event.digest,
                parent_digest=event.parent,
            )
            for event in batch.events
        ],
    )


def _frame_to_proto(frame: PoolFrame) -> pb.PoolFrame:
    pool, changed = frame.pool, frame.blocks
    return pb.PoolFrame(
        pool_id=pool.pool_id,
        life=pool.blocks.events.life,
        is_first=frame.is_first,
        has_more=frame.has_more,
        num_blocks=pool.blocks.num_blocks,
        block_size=pool.block_size,
        counts=counts_to_proto(frame.counts),
        num_sequences=len(pool.tables),
        blocks=pb.BlockChanges(
            block_ids=pack_int32(changed.block_ids),
            states=bytes(changed.states),
            ref_counts=pack_int32(changed.ref_counts),
            generations=pack_int32(changed.generations),
            parent_ids=pack_int32(changed.parent_ids),
            parent_generations=pack_int32(changed.parent_generations),
        ),
        tables=[
            pb.TableChange(
                sequence_id=table.sequence_id,
                num_kept_blocks=table.num_kept_blocks,
                block_ids=pack_int32(table.block_ids),
                num_known_tokens=table.num_known_tokens,
                num_published_blocks=table.num_published_blocks,
            )
            for table in frame.tables
        ],
        gone_sequence_ids=pack_int64(frame.gone_sequence_ids),
        totals=_totals_to_proto(pool.stats),
    )


def _totals_to_proto(stats: KvStats) -> pb.PoolTotals:
    return pb.PoolTotals(
        prefix_lookup_tokens=stats.num_prefix_lookup_tokens,
        prefix_hit_tokens=stats.num_prefix_hit_tokens,
        host_hit_tokens=stats.num_host_hit_tokens,
        evictions=stats.num_evictions,
        sunk_blocks=stats.num_sunk_blocks,
        swapped_out_blocks=stats.num_swapped_out_blocks,
        swapped_in_blocks=stats.num_swapped_in_blocks,
    )
