"""A Redis that is full, a replica, hangs, is gone, or comes back empty, under load: no request fails because of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.api_keys import Tenant
from support.redis_server import RunningRedis, running_redis
from support.running_gateway import RunningGateway, running_gateway, says
from support.tenant_keys import Keys

FAULTS: dict[str, tuple[Callable[[RunningRedis], None], Callable[[RunningRedis], None]]] = {
    "full": (lambda redis: redis.set_full(True), lambda redis: redis.set_full(False)),
    "a replica": (lambda redis: redis.set_replica(True), lambda redis: redis.set_replica(False)),
    "hung": (RunningRedis.pause, RunningRedis.resume),
    "gone": (RunningRedis.kill, RunningRedis.start),
}
FAULT_S = 0.5


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_request_fails_while_redis_does(fault: str, tmp_path: Path) -> None:
    begin, end = FAULTS[fault]
    keys = Keys(acme=Tenant(requests_per_minute=100_000))
    with running_redis(tmp_path) as redis:
        shared: dict[str, Any] = {"limits_redis": redis.url, "response_store_redis": redis.url}
        async with running_gateway(says("the quick fox"), api_keys=keys.text, **shared) as gateway:
            gateway.http.headers.update(keys.of("acme"))
            ends = asyncio.Event()
            clients = [asyncio.create_task(one_after_another(gateway, ends)) for _ in range(4)]
            await asyncio.sleep(0.2)
            await asyncio.to_thread(begin, redis)
            await asyncio.sleep(FAULT_S)
            await asyncio.to_thread(end, redis)
            await asyncio.sleep(0.2)
            ends.set()
            statuses = [status for statuses in await asyncio.gather(*clients) for status in statuses]
            assert set(statuses) == {200} and len(statuses) > 10
            kept = await gateway.post("/v1/responses", input="x", store=True)
            again = await gateway.http.get(f"/v1/responses/{kept.json()['id']}")
            assert again.json()["output"] == kept.json()["output"], "responses are stored again"


async def one_after_another(gateway: RunningGateway, ends: asyncio.Event) -> list[int]:
    """Statuses of answers, some of which are to be stored."""
    statuses = []
    while not ends.is_set():
        statuses.append((await gateway.post("/v1/completions", prompt="x", max_tokens=2)).status_code)
        statuses.append((await gateway.post("/v1/responses", input="x", store=True)).status_code)
    return statuses
