"""Two loaded workers of one pool: the scheduler drives one, and goes on with the other when that one hangs or dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest

from octavo.cli.models import PreparedModel
from octavo.cli.simulated_model import prepare_simulated_model
from support.clusters import free_port, wait_until
from support.completions import SERVED_NAME
from support.redis_server import running_redis
from support.single_services import SingleServices
from support.streams import Stream

H200 = "h200-llama-8b"
PROMPT = list(range(5, 40))
NUM_TOKENS = 300
LEASE_S = 100.0
"""Nobody waits for the end of one: a stream would end sooner, with an error."""


@pytest.fixture(scope="module")
def simulated_model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return prepare_simulated_model(H200, None, print)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


async def test_a_standby_takes_over_from_a_worker_that_hangs_and_from_one_that_dies(
    tmp_path: Path, simulated_model: PreparedModel
) -> None:
    port = free_port()
    with running_redis(tmp_path) as redis, SingleServices(tmp_path) as services:
        shared = {"registry": redis.url, "registry_ttl_s": LEASE_S}
        worker = {**shared, "simulated": H200, "model": simulated_model.folder, "model_name": SERVED_NAME}
        services.start("kvmanager", **shared)
        services.start("worker", "worker-a", **worker)
        services.start("scheduler", step_timeout_s=3.0, **shared)
        services.wait_until_ready("scheduler")
        services.start("worker", "worker-b", **worker)
        services.start("gateway", port=port, model=simulated_model.folder, **shared)
        services.wait_until_ready("worker-b")
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60) as client:
            await asyncio.to_thread(wait_until, lambda: is_ready(port), 30.0, "the gateway is to be ready")
            undisturbed = Stream()
            await undisturbed.run(client, PROMPT, NUM_TOKENS)
            assert undisturbed.error is None and len(undisturbed.token_ids) == NUM_TOKENS

            hangs = Stream()
            reading = hangs.start(client, PROMPT, NUM_TOKENS)
            await hangs.has_tokens(50)
            services.suspend("worker-a")
            await reading
            assert (hangs.error, hangs.token_ids) == (None, undisturbed.token_ids)
            assert "scheduler left" not in services.log("worker-b")

            services.resume("worker-a")
            services.wait_until_ready("worker-a")
            dies = Stream()
            reading = dies.start(client, PROMPT, NUM_TOKENS)
            await dies.has_tokens(50)
            services.kill("worker-b")
            await reading
            assert (dies.error, dies.token_ids) == (None, undisturbed.token_ids)
