"""Models, versions, request ids, metrics."""

from __future__ import annotations

import asyncio
import time

import grpc
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.common.admin import AdminServicer
from octavo.gateway.metrics import merged
from support.running_gateway import MAX_MODEL_LEN, running_gateway, says
from support.waiting import eventually


async def test_served_model_is_listed() -> None:
    async with running_gateway(says("x")) as gateway:
        models = await gateway.openai.models.list()
        assert [model.id for model in models.data] == ["m"]
        assert (await gateway.openai.models.retrieve("m")).model_dump()["max_model_len"] == MAX_MODEL_LEN
        with pytest.raises(openai.NotFoundError) as missing:
            await gateway.openai.models.retrieve("some/other")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        assert (await gateway.http.get("/version")).json() == {"version": "0.1.0"}


async def test_request_id_of_the_client_is_kept_and_others_are_made() -> None:
    async with running_gateway(says("x")) as gateway:
        mine = await gateway.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "abc-1"})
        bad = await gateway.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "a b"})
    assert mine.headers["x-request-id"] == "abc-1"
    assert mine.json()["id"] == "cmpl-abc-1"
    assert gateway.scheduler.submits[0].request_id == "abc-1"
    assert len(bad.headers["x-request-id"]) == 32


async def test_head_is_answered_as_get_without_the_body() -> None:
    async with running_gateway(says("x")) as gateway:
        for path in ("/health/live", "/health/ready", "/metrics", "/ui/", "/docs", "/version", "/v1/models"):
            head, got = await gateway.http.head(path), await gateway.http.get(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert got.content and head.headers["content-type"] == got.headers["content-type"]
            assert path == "/metrics" or head.headers["content-length"] == got.headers["content-length"]
        assert (await gateway.http.head("/ui")).status_code == 308
        assert (await gateway.http.head("/v1/completions")).status_code == 405
        assert (await gateway.http.head("/ui/api/stream")).status_code == 405, "it has no end"


async def test_schema_is_published() -> None:
    async with running_gateway(says("x")) as gateway:
        schema = (await gateway.http.get("/openapi.json")).json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    assert "ignore_eos" in schema["components"]["schemas"]["CompletionRequest"]["properties"]


def sample(text: str, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(text)
    return sum(s.value for f in families for s in f.samples if s.name == name and s.labels == labels)


def growth(before: str, after: str, name: str, **labels: str) -> float:
    return sample(after, name, **labels) - sample(before, name, **labels)


def histograms(text: str) -> dict[str, list[float]]:
    """The samples of each histogram of the gateway."""
    families = text_string_to_metric_families(text)
    return {f.name: [s.value for s in f.samples] for f in families if f.type == "histogram"}


async def test_metrics_count_requests_and_tokens_and_always_parse() -> None:
    async with running_gateway(says("the quick")) as gateway:
        before = (await gateway.http.get("/metrics")).text
        await gateway.complete(prompt=[5, 6], max_tokens=3)
        await gateway.post("/v1/completions", prompt="")
        await gateway.http.delete("/v1/completions/a/b")
        after = (await gateway.http.get("/metrics")).text

    def grown(name: str, **labels: str) -> float:
        return growth(before, after, name, **labels)

    assert grown("octavo_http_requests_total", route="/v1/completions", status="200") == 1
    assert grown("octavo_http_requests_total", route="/v1/completions", status="400") == 1
    assert grown("octavo_http_requests_total", route="/v1/completions/{response_id}", status="200") == 1
    assert grown("octavo_prompt_tokens_total") == 2
    assert grown("octavo_output_tokens_total") == 3
    assert grown("octavo_ttft_seconds_count") == 1
    assert grown("octavo_inter_token_latency_seconds_count") == 2
    assert grown("octavo_request_seconds_count") == 1
    for name in ("queue_seconds", "prefill_seconds", "decode_seconds", "time_per_output_token_seconds"):
        assert grown(f"octavo_{name}_count") == 1, name
    assert grown("octavo_request_prompt_tokens_sum") == 2
    assert grown("octavo_request_output_tokens_sum") == 3
    assert grown("octavo_finished_choices_total", reason="length") == 1


async def test_times_are_those_that_the_client_of_a_stream_sees() -> None:
    async with running_gateway(says("the quick fox"), step_s=0.05) as gateway:
        before = (await gateway.http.get("/metrics")).text
        began = time.perf_counter()
        arrivals = []
        body = {"prompt": [5, 6], "max_tokens": 5, "ignore_eos": True, "stream": True}
        async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if "text" in line:
                    arrivals.append(time.perf_counter() - began)
        after = (await gateway.http.get("/metrics")).text
    slack_s = 0.04
    assert growth(before, after, "octavo_ttft_seconds_sum") == pytest.approx(arrivals[0], abs=slack_s)
    tpot_s = (arrivals[-1] - arrivals[0]) / 4
    assert growth(before, after, "octavo_time_per_output_token_seconds_sum") == pytest.approx(tpot_s, abs=slack_s)
    spent_s = sum(growth(before, after, f"octavo_{part}_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert spent_s == pytest.approx(arrivals[-1], abs=2 * slack_s)


async def test_text_that_is_held_back_is_not_yet_the_first_output() -> None:
    async with running_gateway(says("the quick fox"), step_s=0.05) as gateway:
        before = (await gateway.http.get("/metrics")).text
        body = {"prompt": [5], "max_tokens": 5, "stream": True, "stop": ["the quick fox jumps"]}
        assert await gateway.chunks("/v1/completions", **{k: v for k, v in body.items() if k != "stream"})
        after = (await gateway.http.get("/metrics")).text
    held_s = growth(before, after, "octavo_ttft_seconds_sum")
    assert held_s > growth(before, after, "octavo_prefill_seconds_sum") + 0.05


async def test_client_that_leaves_before_its_first_token_is_counted_without_latencies() -> None:
    async with running_gateway(says("x", never_starts=True)) as gateway:
        before = (await gateway.http.get("/metrics")).text
        asking = asyncio.create_task(gateway.post("/v1/completions", prompt="x", n=2))
        await eventually(lambda: gateway.scheduler.num_running == 1)
        asking.cancel()
        await eventually(lambda: len(gateway.scheduler.aborts) == 1)
        after = (await gateway.http.get("/metrics")).text
    left = 'octavo_http_requests_total{route="/v1/completions",status="499"}'
    assert left in after
    assert growth(before, after, "octavo_finished_choices_total", reason="abort") == 2
    assert histograms(before) == histograms(after)


async def test_scheduler_metrics_are_shown_beside_the_gateways_own() -> None:
    server = grpc.aio.server()
    AdminServicer(lambda: "").add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with running_gateway(says("x"), scheduler_admin=f"127.0.0.1:{port}") as gateway:
        response = await gateway.http.get("/metrics")
    await server.stop(None)
    assert response.status_code == 200
    names = [family.name for family in text_string_to_metric_families(response.text)]
    assert len(names) == len(set(names))


async def test_scheduler_that_does_not_answer_does_not_hurt_the_metrics() -> None:
    async with running_gateway(says("x"), scheduler_admin="127.0.0.1:1") as gateway:
        response = await gateway.http.get("/metrics")
    assert response.status_code == 200
    assert "octavo_ttft_seconds" in response.text


def test_merged_exposition_has_each_family_once() -> None:
    own = b"# HELP octavo_a A.\n# TYPE octavo_a counter\noctavo_a_total 1.0\n"
    other = (
        b"# HELP octavo_a A.\n# TYPE octavo_a counter\noctavo_a_total 9.0\n"
        b"# HELP python_info P.\n# TYPE python_info gauge\npython_info 1.0\n"
        b"# HELP octavo_b B.\n# TYPE octavo_b gauge\noctavo_b 2.0\n"
    )
    assert merged(own, other) == own + b"# HELP octavo_b B.\n# TYPE octavo_b gauge\noctavo_b 2.0\n"
