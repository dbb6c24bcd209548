"""DELETE /v1/prefix_cache: a tenant has what is cached of its prompts and answers dropped."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import grpc
import structlog
from fastapi import APIRouter, Request
from pydantic import BaseModel

from octavo.common.errors import NotReadyError
from octavo.common.links import TlsFiles, open_channel
from octavo.common.roles import Role
from octavo.gateway.cache_salt import salt_of
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError
from octavo.gateway.openapi import answers
from octavo.gateway.request_account import ANONYMOUS, account_of
from octavo.gateway.worker_groups import WorkerGroups
from octavo.v1 import kvmanager_service_pb2 as pb
from octavo.v1 import kvmanager_service_pb2_grpc as pb_grpc

log = structlog.get_logger()

_TIMEOUT_S = 10.0


class FlushedCache(BaseModel):
    """What the flush did."""

    object: Literal["prefix_cache.flushed"]
    freed_blocks: int
    """Cached blocks that are free now."""
    used_blocks: int
    """Blocks that requests use, and that no later one finds."""


def router(config: GatewayConfig, groups: WorkerGroups) -> APIRouter:
    """The route. Without keys there is no tenant whose prefixes these would be, so everybody's would go: refused."""
    routes = APIRouter()

    @routes.delete("/v1/prefix_cache", responses=answers(FlushedCache))
    async def flush_prefix_cache(request: Request) -> dict[str, Any]:
        tenant = account_of(request.scope).tenant_name
        if tenant == ANONYMOUS:
            raise FieldError(None, "only a tenant with an API key can flush its prefixes", "keys_required", status=403)
        salt = salt_of(config, tenant, None)
        targets = groups.admin_targets(Role.KVMANAGER)
        unknown = [state.pool_id for state in groups.states if state.pool_id not in targets]
        if unknown or not targets:
            which = f"the KV manager of {', '.join(unknown)}" if unknown else "a KV manager"
            raise NotReadyError(f"this gateway does not know {which}: see kvmanager_admin")
        asked = {pool_id if len(targets) > 1 else "": target for pool_id, target in targets.items()}
        flushed = await asyncio.gather(
            *(_flush(target, config.link_tls, pool_id, salt) for pool_id, target in asked.items())
        )
        freed, used = (sum(getattr(one, name) for one in flushed) for name in ("num_freed_blocks", "num_used_blocks"))
        log.info("prefixes of a tenant flushed", tenant=tenant, freed_blocks=freed)
        return {"object": "prefix_cache.flushed", "freed_blocks": freed, "used_blocks": used}

    return routes


async def _flush(target: str, tls: TlsFiles | None, pool_id: str, salt: bytes) -> pb.FlushPrefixCacheResponse:
    """Raises NotReadyError if the KV manager does not answer in time."""
    try:
        async with open_channel(target, Role.KVMANAGER, tls) as channel:
            stub: Any = pb_grpc.KvManagerServiceStub(channel)
            answer: pb.FlushPrefixCacheResponse = await stub.FlushPrefixCache(
                pb.FlushPrefixCacheRequest(pool_id=pool_id, salt=salt), timeout=_TIMEOUT_S
            )
    except (OSError, grpc.aio.AioRpcError) as error:
        reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__
        raise NotReadyError(f"the KV manager does not answer: {reason}") from error
    return answer
