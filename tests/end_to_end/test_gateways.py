"""Two gateway processes on one port serve as one: nothing that a client relies on stays in either."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import H200, ProcessCluster, ServerSettings, running_cluster, wait_until
from support.redis_server import running_redis

PROMPT = [(7 * position) % 300 + 5 for position in range(40)]


class FreshConnections:
    """Each call is a connection of its own, which the kernel gives to one of the gateways."""

    def __init__(self, url: str) -> None:
        self._url = url

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False, verify=False) as http:
            return http.request(method, path, **options)


def replace_a_gateway_under_load(cluster: ProcessCluster) -> None:
    """Official clients, which ask again where they are told to, do not notice (ops-a3e)."""
    old, ends = cluster.pids()["gateway"], threading.Event()

    def keep_asking() -> int:
        num_answered = 0
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=4, timeout=60) as client:
            [model] = client.models.list().data
            while not ends.is_set():
                answer = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=8)
                num_answered += len(answer.choices)
        return num_answered

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(keep_asking) for _ in range(4)]
        try:
            os.kill(old, signal.SIGTERM)
            wait_until(lambda: not Path(f"/proc/{old}").exists(), 20.0, "it does not end")
            cluster.wait_until_ready()
        finally:
            ends.set()
        assert min(client.result(60) for client in clients) > 0
    wait_until(lambda: cluster.log().count("gateway started") == 3, 20.0, "it is not started again")


def test_any_gateway_knows_what_another_was_told(
    simulated_model: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(gateways=2, simulated=H200, num_blocks=300, max_model_len=2048)
    with (
        running_redis(tmp_path) as redis,
        running_cluster(simulated_model, replace(settings, redis=redis.url)) as cluster,
    ):
        assert isinstance(cluster, ProcessCluster)
        calls = FreshConnections(cluster.url)
        counted = 0

        for _ in range(8):
            body = {"input": "abc", "max_output_tokens": 8, "temperature": 0}
            made = calls.call("POST", "/v1/responses", json=body).json()
            found = [calls.call("GET", f"/v1/responses/{made['id']}") for _ in range(3)]
            assert [answer.status_code for answer in found] == [200, 200, 200]
            assert found[0].json() == made
            counted += 1
            exposition = calls.call("GET", "/metrics").text
            assert f'octavo_http_requests_total{{route="/v1/responses",status="200"}} {counted}.0' in exposition
        assert "octavo_open_generations 0.0" in exposition
        assert cluster.metric("octavo_inter_token_latency_seconds_count") > 0
        assert {"gateway-1", "gateway-2"} <= {word for word in cluster.log().split() if word.startswith("gateway-")}

        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "keep": 60}
        kept = calls.call("POST", "/v1/completions", json=body).json()
        branch = {"branch": {"id": kept["id"]}, "prompt": [5], "max_tokens": 1}
        for _ in range(6):
            goes_on = calls.call("POST", "/v1/completions", json=branch)
            assert goes_on.status_code == 200
            assert goes_on.json()["usage"]["prompt_tokens"] == len(PROMPT) + 4 + 1
            assert calls.call("GET", f"/v1/requests/{kept['id']}/why").status_code == 200
        assert calls.call("DELETE", f"/v1/completions/{kept['id']}").status_code == 200
        statuses = {calls.call("POST", "/v1/completions", json=branch).status_code for _ in range(4)}
        assert statuses == {404}

        replace_a_gateway_under_load(cluster)
        os.kill(cluster.pids()["gateway"], signal.SIGKILL)
        served = 0

        def is_served() -> bool:
            nonlocal served
            try:
                served += calls.call("GET", f"/v1/responses/{made['id']}").status_code == 200
            except httpx.TransportError:  # it was on its way to the one that died
                served = 0
            return served >= 20

        wait_until(is_served, 20, "the other gateway does not serve")
        exposition = calls.call("GET", "/metrics").text
        assert f'octavo_http_requests_total{{route="/v1/responses",status="200"}} {counted}.0' in exposition
