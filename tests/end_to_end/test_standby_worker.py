"""Two loaded workers of one pool: the scheduler drives one, and goes on with the other when that one dies."""

from __future__ import annotations

import asyncio
import time
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


async def test_a_standby_takes_over_with_its_model_loaded(tmp_path: Path, simulated_model: PreparedModel) -> None:
    port = free_port()
    with running_redis(tmp_path) as redis, SingleServices(tmp_path) as services:
        shared = {"registry": redis.url}
        worker = {**shared, "simulated": H200, "model": simulated_model.folder, "model_name": SERVED_NAME}
        services.start("kvmanager", **shared)
        services.start("worker", "worker-a", **worker)
        services.start("scheduler", **shared)
        services.wait_until_ready("scheduler")
        services.start("worker", "worker-b", **worker)
        services.start("gateway", port=port, model=simulated_model.folder, **shared)
        services.wait_until_ready("worker-b")
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60) as client:
            await asyncio.to_thread(wait_until, lambda: is_ready(port), 30.0, "the gateway is to be ready")
            undisturbed, disturbed = Stream(), Stream()
            await undisturbed.run(client, PROMPT, NUM_TOKENS)
            reading = disturbed.start(client, PROMPT, NUM_TOKENS)
            await disturbed.has_tokens(50)
            services.kill("worker-a")
            killed_at = time.monotonic()
            await disturbed.has_tokens(NUM_TOKENS // 2)
            took_s = time.monotonic() - killed_at
            await reading
        assert undisturbed.error is None and len(undisturbed.token_ids) == NUM_TOKENS
        assert (disturbed.error, disturbed.token_ids) == (None, undisturbed.token_ids)
        assert took_s < 8.0, "a lease need not end, nor a model be loaded"
