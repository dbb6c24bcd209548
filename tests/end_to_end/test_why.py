"""What clients are told of their requests, over the whole system."""

from __future__ import annotations

import httpx
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import ServerSettings, Transport, running_cluster


@pytest.mark.parametrize("transport", ["frames", "local"])
def test_a_repeated_prompt_is_explained_by_its_hits(transport: Transport, tiny_model: PreparedModel) -> None:
    prompt = [(7 * position) % 300 + 5 for position in range(70)]
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with (
        running_cluster(tiny_model, ServerSettings(transport, block_size=16)) as cluster,
        httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as http,
    ):
        cold = http.post("/v1/completions", json=body, headers={"x-request-id": "cold-1"}).json()
        warm = http.post("/v1/completions", json=body).json()
        both = http.post("/v1/completions", json={**body, "prompt": [prompt, prompt[:20]]}).json()
        told = [http.get(f"/v1/requests/{answer['id']}/why").json() for answer in (cold, warm, both)]
        missing = http.get("/v1/requests/cold-2/why")
        metrics = http.get("/metrics").text
        live = http.get(f"/ui/api/requests/{warm['id']}/why").status_code
    first, second = told[0]["prompts"][0], told[1]["prompts"][0]
    assert (told[0]["id"], first["state"], first["num_prompt_tokens"]) == ("cold-1", "ended", 70)
    [admission] = first["sequences"][0]["admissions"]
    assert "hit_device" not in admission["blocks"]
    [admission] = second["sequences"][0]["admissions"]
    assert admission["blocks"] == {"hit_device": 4, "tail_not_full": 1}
    assert 0 < second["first_token_s"] <= second["ended_s"]
    assert [prompt["num_prompt_tokens"] for prompt in told[2]["prompts"]] == [70, 20]
    assert missing.status_code == 404
    assert live == (503 if transport == "local" else 200), "in one process nobody is told where to ask"
    assert 'octavo_prefix_blocks_total{outcome="hit_device"}' in metrics
    assert 'octavo_request_wait_seconds_total{cause="no_slot"}' in metrics


def test_the_live_view_is_wired_to_both_services(tiny_model: PreparedModel) -> None:
    with (
        running_cluster(tiny_model, ServerSettings("frames", block_size=16, num_blocks=128)) as cluster,
        httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as http,
    ):
        http.post("/v1/completions", json={"prompt": list(range(5, 75)), "max_tokens": 4, "ignore_eos": True})
        with http.stream("GET", "/ui/api/stream") as response:
            seen = b""
            for chunk in response.iter_raw():
                seen += chunk
                if b'"type":"pool"' in seen and b'"type":"activity"' in seen:
                    break
    assert b'"num_blocks":128,"block_size":16' in seen
    assert b'"output_tokens":4' in seen
