"""200 clients at once, most of which leave at a random moment: nothing is left behind, and memory stays flat."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from octavo.scheduler.timeline import EndedRequest, Step
from support.clusters import Cluster, ProcessCluster, ServerSettings
from support.tiny_models import prompt_of

NUM_CLIENTS = 200
MAX_GROWTH_BYTES = 8 * 2**20
"""Of the last of five rounds above the highest of the first two."""
MAX_NEW_OBJECTS = 500
"""After two more storms, or one, whichever has fewer: tasks of clients that have just left are still on their way out.
What the timeline keeps is not counted: it holds a fixed number of entries, which these storms do not fill."""

ROOMY = ServerSettings("frames", max_num_seqs=32, block_size=8, num_blocks=1200)
CROWDED = ServerSettings("grpc", max_num_seqs=32, block_size=8, num_blocks=90)
"""Most requests wait, and those that run preempt one another."""


async def one_client(http: httpx.AsyncClient, rng: random.Random) -> int | None:
    """The status of a request that was waited for; None if the client left before its end."""
    prompt = prompt_of(rng.choice([1, 8, 9, 40, 120, 300]))
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": rng.randint(1, 150),
        "n": rng.choice([1, 1, 1, 2, 3]),
        "ignore_eos": True,
        "stream": rng.random() < 0.6,
        "seed": rng.randrange(1000),
    }
    stays_s = rng.uniform(0.0, 2.0) if rng.random() < 0.85 else None
    await asyncio.sleep(rng.uniform(0.0, 0.5))
    try:
        async with asyncio.timeout(stays_s), http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                assert '"error"' not in line, line
            return response.status_code
    except TimeoutError:
        return None


async def storm(cluster: Cluster, seed: int) -> list[int | None]:
    limits = httpx.Limits(max_connections=NUM_CLIENTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=cluster.url, limits=limits, timeout=120, trust_env=False) as http:
        clients = [one_client(http, random.Random(seed * NUM_CLIENTS + number)) for number in range(NUM_CLIENTS)]
        return list(await asyncio.gather(*clients))


@pytest.fixture(scope="module", autouse=True)
def few_records() -> Iterator[None]:
    """What the scheduler keeps of finished requests is bounded; the bound is lowered so that it is reached at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_SCHEDULER_NUM_EXPLAINED_REQUESTS", "100")
        yield


@pytest.mark.parametrize("cluster", [ROOMY, CROWDED], indirect=True, ids=["roomy", "crowded"])
async def test_nothing_is_left_of_clients_that_leave_at_any_moment(cluster: Cluster) -> None:
    assert isinstance(cluster, ProcessCluster)
    memory = []
    for round_no in range(5):
        statuses = await storm(cluster, round_no)
        assert set(statuses) == {200, None}
        cluster.assert_idle(within_s=1.5)
        memory.append(cluster.memory_bytes())
    assert cluster.metric("octavo_open_generations") == 0
    assert cluster.metric("octavo_client_disconnects_total") > 0
    if cluster.settings == CROWDED:
        assert cluster.metric("octavo_preemptions_total") > 0
    for service, last in memory[-1].items():
        assert last - max(early[service] for early in memory[:2]) < MAX_GROWTH_BYTES, (service, memory)


async def count_objects() -> int:
    """Once what has just ended is gone."""
    await asyncio.sleep(0.1)
    gc.collect()
    return sum(type(found) not in (Step, EndedRequest) for found in gc.get_objects())


@pytest.mark.parametrize("cluster", [replace(ROOMY, transport="local")], indirect=True, ids=["one process"])
async def test_no_python_object_is_left_of_clients_that_leave_at_any_moment(cluster: Cluster) -> None:
    num_objects = []
    for round_no in range(4):
        await storm(cluster, round_no)
        cluster.assert_idle(within_s=1.5)
        num_objects.append(min([await count_objects() for _ in range(3)]))
    assert min(num_objects[2:]) - num_objects[1] < MAX_NEW_OBJECTS, num_objects
