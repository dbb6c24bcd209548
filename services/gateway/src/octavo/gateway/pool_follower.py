"""Follows the events of one pool at its KV manager, and keeps its directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc
import structlog

from octavo.common.block_hash import BlockHasher, HashAlgorithm
from octavo.common.links import TlsFiles, open_channel
from octavo.common.roles import Role
from octavo.gateway.pool_directory import PoolDirectory
from octavo.v1 import kvmanager_service_pb2 as pb
from octavo.v1 import kvmanager_service_pb2_grpc as pb_grpc

log = structlog.get_logger()

_FIRST_RETRY_S, _MAX_RETRY_S = 0.2, 1.0
_CALL_TIMEOUT_S = 5.0
_KEPT = (pb.EVENT_KIND_STORED, pb.EVENT_KIND_RESTORED)


class PoolFollower:
    """`run` follows until cancelled. While the KV manager is away the directory is empty: no hit is foreseen there."""

    def __init__(
        self, pool_id: str, find_target: Callable[[], str], directory: PoolDirectory, tls: TlsFiles | None = None
    ) -> None:
        """`find_target`: gRPC target of the pool's KV manager; empty while it is not to be followed."""
        self._pool_id = pool_id
        self._find_target = find_target
        self._directory = directory
        self._tls = tls

    async def run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while True:
            if target := self._find_target():
                try:
                    async with open_channel(target, Role.KVMANAGER, self._tls) as channel:
                        await self._follow(channel)
                    retry_s = _FIRST_RETRY_S
                except (grpc.aio.AioRpcError, ImportError, OSError, ValueError) as error:
                    reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                    log.debug("pool not followed", pool_id=self._pool_id, error=reason)
                finally:
                    self._directory.clear()
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        stub: Any = pb_grpc.KvManagerServiceStub(channel)
        asked = pb.InspectPoolRequest(pool_id=self._pool_id, skip_ledger=True)
        pool = await stub.InspectPool(asked, timeout=_CALL_TIMEOUT_S)
        algorithm = cast(HashAlgorithm, pool.hash_algorithm)
        hasher = BlockHasher.of_root(pool.block_size, algorithm, pool.hash_root)
        is_in_snapshot = False
        async for batch in stub.WatchEvents(pb.WatchEventsRequest(pool_id=self._pool_id)):
            if batch.is_snapshot and not is_in_snapshot:
                self._directory.clear(hasher)
            is_in_snapshot = batch.is_snapshot and batch.has_more
            self._apply(batch)
            if batch.is_snapshot and pool.life != batch.life:
                return  # another life of the pool: its blocks may be named anew
        log.info("pool followed no more", pool_id=self._pool_id)

    def _apply(self, batch: pb.EventBatch) -> None:
        for event in batch.events:
            if event.kind in _KEPT:
                self._directory.store(event.digest, event.tier)
            else:
                self._directory.drop(event.digest, event.tier)
