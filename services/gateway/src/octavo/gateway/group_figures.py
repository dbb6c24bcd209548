"""All groups side by side, for people: what each has to do, and what its prefix cache saves."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from octavo.common.links import TlsFiles, open_channel
from octavo.common.roles import Role
from octavo.gateway.routed_group import GroupState
from octavo.gateway.worker_groups import WorkerGroups
from octavo.v1 import kvmanager_service_pb2 as pb
from octavo.v1 import kvmanager_service_pb2_grpc as pb_grpc

_TIMEOUT_S = 1.0


class GroupFigures:
    """Asks the KV managers, over one channel to each that is opened on first use."""

    def __init__(self, groups: WorkerGroups, tls: TlsFiles | None = None) -> None:
        self._groups, self._tls = groups, tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def read(self) -> list[dict[str, Any]]:
        """Of each group, by name. What its KV manager would tell is None if it does not answer in time."""
        states = self._groups.states
        targets = self._groups.admin_targets(Role.KVMANAGER)
        for target in self._channels.keys() - set(targets.values()):
            await self._channels.pop(target).close(None)
        pools = await asyncio.gather(
            *(self._inspect(targets.get(one.pool_id, ""), one.pool_id if len(states) > 1 else "") for one in states)
        )
        return [_figures(state, pool) for state, pool in zip(states, pools, strict=True)]

    async def _inspect(self, target: str, pool_id: str) -> pb.InspectPoolResponse | None:
        if not target:
            return None
        try:
            if target not in self._channels:
                self._channels[target] = open_channel(target, Role.KVMANAGER, self._tls)
            stub: Any = pb_grpc.KvManagerServiceStub(self._channels[target])
            asked = pb.InspectPoolRequest(pool_id=pool_id, skip_ledger=True)
            pool: pb.InspectPoolResponse = await stub.InspectPool(asked, timeout=_TIMEOUT_S)
        except (OSError, grpc.aio.AioRpcError):
            return None
        return pool

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)


def _figures(state: GroupState, pool: pb.InspectPoolResponse | None) -> dict[str, Any]:
    load = state.load
    return {
        "pool_id": state.pool_id,
        "why_not_ready": state.why_not_ready,
        "running": load.num_running,
        "max_running": load.max_num_running,
        "waiting": load.num_waiting,
        "waiting_tokens": load.num_waiting_tokens,
        "blocks": load.num_blocks,
        "available_blocks": load.num_available_blocks,
        "routed_requests": state.num_routed_requests,
        "lookup_tokens": pool.totals.prefix_lookup_tokens if pool is not None else None,
        "hit_tokens": pool.totals.prefix_hit_tokens if pool is not None else None,
    }
