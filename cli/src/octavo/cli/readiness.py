"""Watches the services until the gateway says that it can serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import httpx

from octavo.cli.progress import Progress
from octavo.common.links import Address
from octavo.v1 import admin_service_pb2 as pb
from octavo.v1 import admin_service_pb2_grpc as pb_grpc

_POLL_INTERVAL_S = 0.25
_CALL_TIMEOUT_S = 2.0


async def wait_until_ready(url: str, worker_admin: Address, progress: Progress) -> None:
    """Return when `url`/health/ready answers 200, and all groups are ready.

    Meanwhile tell what the worker says about its model.
    """
    # Only its own gateway is asked, whose certificate may not be for this address.
    async with httpx.AsyncClient(timeout=_CALL_TIMEOUT_S, trust_env=False, verify=False) as client:
        while not await _is_ready(client, url):
            progress(await _worker_state(worker_admin))
            await asyncio.sleep(_POLL_INTERVAL_S)


async def _is_ready(client: httpx.AsyncClient, url: str) -> bool:
    try:
        answer = await client.get(f"{url}/health/ready")
        groups = answer.json().get("groups", {})
    except (httpx.TransportError, ValueError):
        return False
    return answer.status_code == httpx.codes.OK and all(state == "ready" for state in groups.values())


async def _worker_state(address: Address) -> str:
    async with grpc.aio.insecure_channel(address.grpc_target) as channel:
        call: Callable[..., grpc.aio.UnaryUnaryCall[pb.GetHealthRequest, pb.GetHealthResponse]] = (
            pb_grpc.AdminServiceStub(channel).GetHealth
        )
        try:
            health = await call(pb.GetHealthRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return "starting the services"
    return "joining the services" if health.ready else f"worker: {health.reason}"
