"""API keys, tenants and their limits, as clients see them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from structlog.testing import capture_logs

from octavo.gateway import key_sources
from octavo.gateway.api_keys import Tenant
from octavo.gateway.key_sources import change_file
from octavo.v1 import kvmanager_service_pb2 as pb
from octavo.v1 import kvmanager_service_pb2_grpc as pb_grpc
from support.redis_server import running_redis
from support.running_gateway import RunningGateway, running_gateway, says
from support.tenant_keys import Keys
from support.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "x"}]
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5], "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "model": "m"},
}


@contextlib.asynccontextmanager
async def gateway_with(keys: Keys, text: str = "the quick fox", **settings: Any) -> AsyncIterator[RunningGateway]:
    async with running_gateway(says(text), api_keys=keys.text, **settings) as gateway:
        yield gateway


async def test_nothing_is_served_without_a_key_but_health_version_and_schema() -> None:
    keys = Keys(acme=Tenant(), boss=Tenant(operator=True))
    async with gateway_with(keys) as gateway:
        for path in (*PATHS, "/tokenize", "/detokenize", "/v1/embeddings"):
            missing = await gateway.post(path, **BODIES.get(path, {}))
            assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer"), path
            wrong = await gateway.http.post(path, json={}, headers={"authorization": "Bearer sk-octavo-nope"})
            assert wrong.status_code == 401
        for path in ("/v1/models", "/metrics", "/v1/requests/x/why", "/v1/responses/resp_1", "/nowhere"):
            assert (await gateway.http.get(path)).status_code == 401, path
        for path in ("/health/live", "/health/ready", "/version", "/openapi.json"):
            assert (await gateway.http.get(path)).status_code == 200, path
        assert gateway.scheduler.submits == []
        assert (await gateway.http.get("/metrics", headers=keys.of("acme"))).status_code == 403
        assert (await gateway.http.get("/metrics", headers=keys.of("boss"))).status_code == 200
        for path in PATHS:
            assert (await gateway.http.post(path, json=BODIES[path], headers=keys.of("acme"))).status_code == 200


async def test_refusals_have_the_shape_of_the_api_that_was_asked() -> None:
    keys = Keys(acme=Tenant())
    async with gateway_with(keys) as gateway:
        with pytest.raises(openai.AuthenticationError) as raised:
            await gateway.openai.chat.completions.create(model="m", messages=MESSAGES)
        assert raised.value.code == "invalid_api_key"
        client = gateway.openai.with_options(api_key=keys["acme"])
        assert (await client.chat.completions.create(model="m", messages=MESSAGES)).choices[0].message.content
        anthropic = await gateway.http.post("/v1/messages", json={}, headers={"x-api-key": "nope"})
        assert anthropic.status_code == 401
        assert anthropic.json()["error"]["type"] == "authentication_error"
        served = await gateway.http.post(
            "/v1/messages", json=BODIES["/v1/messages"], headers={"x-api-key": keys["acme"]}
        )
        assert served.status_code == 200


async def test_tenants_share_neither_prefixes_nor_responses_nor_explanations() -> None:
    keys = Keys(a=Tenant(), b=Tenant())
    async with gateway_with(keys) as gateway:
        for name in ("a", "b", "a"):
            for path in PATHS:
                await gateway.http.post(path, json=BODIES[path], headers=keys.of(name))
        salts = [submit.cache_salt for submit in gateway.scheduler.submits]
        assert salts == [salts[0]] * 4 + [salts[4]] * 4 + [salts[0]] * 4
        assert salts[0] != salts[4]
        narrowed = {**BODIES[PATHS[0]], "cache_salt": salts[4].hex()}
        await gateway.http.post(PATHS[0], json=narrowed, headers=keys.of("a"))
        assert gateway.scheduler.submits[-1].cache_salt[:16] == salts[0]
        made = (await gateway.http.post("/v1/responses", json=BODIES["/v1/responses"], headers=keys.of("a"))).json()
        address = f"/v1/responses/{made['id']}"
        assert (await gateway.http.get(address, headers=keys.of("b"))).status_code == 404
        assert (await gateway.http.delete(address, headers=keys.of("b"))).status_code == 404
        goes_on = {**BODIES["/v1/responses"], "previous_response_id": made["id"]}
        assert (await gateway.http.post("/v1/responses", json=goes_on, headers=keys.of("b"))).status_code == 404
        assert (await gateway.http.get(address, headers=keys.of("a"))).status_code == 200
        await gateway.http.delete("/v1/completions/cmpl-1", headers=keys.of("b"))
        assert gateway.scheduler.forgotten[-1].cache_salt == salts[4]
        for name, salt in (("a", salts[0]), ("b", salts[4])):
            await gateway.http.get("/v1/requests/r/why", headers=keys.of(name))
            assert gateway.scheduler.explained[-1].salt_head == salt


async def test_a_tenant_steps_back_and_never_ahead_of_its_own_priority() -> None:
    keys = Keys(slow=Tenant(priority=3), fast=Tenant(priority=-2))
    async with gateway_with(keys) as gateway:
        for name, asked in (("slow", -50), ("slow", 0), ("slow", 4), ("fast", -50), ("fast", 1)):
            body = {**BODIES[PATHS[0]], "priority": asked}
            assert (await gateway.http.post(PATHS[0], json=body, headers=keys.of(name))).status_code == 200
    assert [submit.priority for submit in gateway.scheduler.submits] == [3, 3, 7, -2, -1]


async def test_the_scheduler_is_told_whose_a_request_is_and_its_weight() -> None:
    keys = Keys(heavy=Tenant(weight=5), plain=Tenant())
    async with gateway_with(keys) as gateway:
        for name in ("heavy", "plain"):
            await gateway.http.post(PATHS[0], json=BODIES[PATHS[0]], headers=keys.of(name))
    assert [(one.tenant, one.weight) for one in gateway.scheduler.submits] == [("heavy", 5), ("plain", 1)]


async def test_requests_over_the_limit_get_429_and_headers_count_down() -> None:
    keys = Keys(acme=Tenant(requests_per_minute=3), free=Tenant())
    async with gateway_with(keys) as gateway:
        left = []
        for path in PATHS[:3]:
            answer = await gateway.http.post(path, json=BODIES[path], headers=keys.of("acme"))
            assert answer.status_code == 200
            left.append(answer.headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-reset-requests"].startswith(("59.", "1m0s"))
        client = gateway.openai.with_options(api_key=keys["acme"])
        with pytest.raises(openai.RateLimitError) as raised:
            await client.completions.create(model="m", prompt="x")
        error: Any = raised.value
        assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
        assert 18 <= int(error.response.headers["retry-after"]) <= 20
        assert 18_000 <= int(error.response.headers["retry-after-ms"]) <= 20_000
        anthropic = await gateway.http.post("/v1/messages", json=BODIES["/v1/messages"], headers=keys.of("acme"))
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")
        assert (await gateway.http.get("/v1/models", headers=keys.of("acme"))).status_code == 200
        free = await gateway.http.post(PATHS[0], json=BODIES[PATHS[0]], headers=keys.of("free"))
        assert free.status_code == 200
        assert "x-ratelimit-limit-requests" not in free.headers
    assert len(gateway.scheduler.submits) == 4


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tokens_of_prompts_and_answers_are_counted(is_stream: bool) -> None:
    keys = Keys(acme=Tenant(tokens_per_minute=100))
    async with gateway_with(keys) as gateway:
        body = {"prompt": list(range(5, 35)), "max_tokens": 60, "ignore_eos": True, "stream": is_stream}
        first = await gateway.http.post(PATHS[0], json=body, headers=keys.of("acme"))
        assert (first.status_code, first.headers["x-ratelimit-remaining-tokens"]) == (200, "70")
        second = await gateway.http.post(PATHS[0], json=body, headers=keys.of("acme"))
        assert (second.status_code, second.json()["error"]["type"]) == (429, "tokens")
        assert 8 <= int(second.headers["x-ratelimit-remaining-tokens"]) <= 11
        never = await gateway.http.post(
            PATHS[0], json={**body, "prompt": list(range(5, 110)), "max_tokens": 1}, headers=keys.of("acme")
        )
        assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in never.headers


async def test_open_requests_are_limited_and_every_way_out_makes_room() -> None:
    keys = Keys(acme=Tenant(max_concurrent=1))
    async with running_gateway(says("x", never_starts=True), api_keys=keys.text, max_body_bytes=4096) as gateway:
        waiting = asyncio.create_task(gateway.http.post(PATHS[0], json=BODIES[PATHS[0]], headers=keys.of("acme")))
        await eventually(lambda: gateway.scheduler.num_running == 1)
        refused = await gateway.http.post(PATHS[1], json=BODIES[PATHS[1]], headers=keys.of("acme"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "concurrent_requests")
        waiting.cancel()  # its client leaves
        await eventually(lambda: gateway.scheduler.num_running == 0)
        gateway.scheduler.script = says("the fox")
        too_large = await gateway.http.post(PATHS[0], json={"prompt": "x" * 5000}, headers=keys.of("acme"))
        assert too_large.status_code == 413
        for _ in range(2):
            served = await gateway.http.post(PATHS[0], json=BODIES[PATHS[0]], headers=keys.of("acme"))
            assert served.status_code == 200


async def test_a_revoked_key_is_refused_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sources, "RELOAD_S", 0.1)
    file, keys = tmp_path / "keys.yaml", Keys(a=Tenant(), b=Tenant())
    file.write_text(keys.text)
    async with running_gateway(says("x"), api_keys_file=file) as gateway:
        assert (await gateway.http.get("/v1/models", headers=keys.of("a"))).status_code == 200
        change_file(file, lambda book: book.without_key(book.keys[0].key_id))
        async with asyncio.timeout(10):
            while (await gateway.http.get("/v1/models", headers=keys.of("a"))).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await gateway.http.get("/v1/models", headers=keys.of("b"))).status_code == 200


async def test_gateways_share_keys_and_limits_in_redis(tmp_path: Path) -> None:
    keys = Keys(acme=Tenant(requests_per_minute=4))
    with running_redis(tmp_path) as redis:
        settings: dict[str, Any] = {"api_keys": keys.text, "limits_redis": redis.url}
        async with running_gateway(says("x"), **settings) as one, running_gateway(says("x"), **settings) as two:
            statuses = [
                (await gateway.http.post(PATHS[0], json=BODIES[PATHS[0]], headers=keys.of("acme"))).status_code
                for gateway in (one, two, one, two, one, two)
            ]
            assert statuses == [200, 200, 200, 200, 429, 429]
            redis.pause()
            served = await two.http.post(PATHS[0], json=BODIES[PATHS[0]], headers=keys.of("acme"))
            assert served.status_code == 200
            redis.resume()


async def test_keys_that_cannot_be_read_let_nobody_in() -> None:
    async with running_gateway(says("x"), api_keys_redis="redis://127.0.0.1:1/0") as gateway:
        answer = await gateway.http.get("/v1/models", headers={"authorization": "Bearer x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")


async def test_the_access_log_tells_latencies_and_tokens_and_neither_texts_nor_keys() -> None:
    keys = Keys(acme=Tenant(requests_per_minute=2))
    async with gateway_with(keys, "the quick fox") as gateway:
        with capture_logs() as lines:
            body = {"prompt": "sesame", "max_tokens": 3, "ignore_eos": True}
            await gateway.http.post(PATHS[0], json=body, headers=keys.of("acme"))
            await gateway.http.post(PATHS[0], json={"prompt": "sesame", "nope": 1}, headers=keys.of("acme"))
            await gateway.http.post(PATHS[0], json=body, headers={"authorization": "Bearer sk-octavo-wrong"})
    [served] = [line for line in lines if line.get("status") == 200]
    assert served["tenant"] == "acme"
    assert served["output_tokens"] == 3
    assert served["prompt_tokens"] == len(gateway.scheduler.submits[0].prompt_token_ids)
    assert 0 < served["ttft_s"] <= served["duration_s"]
    assert [line["status"] for line in lines if "status" in line] == [200, 400, 401]
    assert not [line for line in lines if "sesame" in str(line) or "sk-octavo" in str(line) or "quick" in str(line)]


class FlushedKvManager(pb_grpc.KvManagerServiceServicer):
    """Has three free blocks more after each flush, and one that is still used."""

    def __init__(self) -> None:
        self.flushes: list[tuple[str, bytes]] = []
        """Pool and salt of each."""

    async def FlushPrefixCache(self, request: Any, context: Any) -> pb.FlushPrefixCacheResponse:
        self.flushes.append((request.pool_id, request.salt))
        return pb.FlushPrefixCacheResponse(num_freed_blocks=3, num_used_blocks=1)

    @contextlib.asynccontextmanager
    async def listening(self, target: str) -> AsyncIterator[None]:
        server = grpc.aio.server()
        add_servicer: Any = pb_grpc.add_KvManagerServiceServicer_to_server
        add_servicer(self, server)
        server.add_insecure_port(target)
        await server.start()
        yield
        await server.stop(None)


async def test_a_tenant_flushes_its_own_prefixes_and_nobody_elses(tmp_path: Path) -> None:
    keys, kvmanager, target = Keys(a=Tenant(), b=Tenant()), FlushedKvManager(), f"unix:{tmp_path}/kv.sock"
    async with gateway_with(keys, kvmanager_admin=target) as gateway:
        async with kvmanager.listening(target):
            for name in ("a", "b"):
                await gateway.http.post(PATHS[0], json=BODIES[PATHS[0]], headers=keys.of(name))
                flushed = await gateway.http.delete("/v1/prefix_cache", headers=keys.of(name))
                assert flushed.json() == {"object": "prefix_cache.flushed", "freed_blocks": 3, "used_blocks": 1}
        away = await gateway.http.delete("/v1/prefix_cache", headers=keys.of("a"))
        assert (away.status_code, away.json()["error"]["code"]) == (503, "service_unavailable")
    assert kvmanager.flushes == [("", submit.cache_salt) for submit in gateway.scheduler.submits]
    assert len(set(kvmanager.flushes)) == 2
    async with running_gateway(says("x"), kvmanager_admin=target) as gateway:
        refused = await gateway.http.delete("/v1/prefix_cache")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "keys_required")


async def test_a_flush_reaches_the_pools_of_all_groups_or_says_that_it_did_not(tmp_path: Path) -> None:
    keys, left, right = Keys(a=Tenant()), FlushedKvManager(), FlushedKvManager()
    members = [
        {"member_id": f"{role}-{pool}", "role": role, "pool_id": pool, "address": address, "admin": address}
        for pool in ("left", "right")
        for role, address in (("scheduler", "grpc://unused:1"), ("kvmanager", f"grpc+unix://{tmp_path}/{pool}.sock"))
    ]
    (tmp_path / "members.json").write_text(json.dumps(members))
    async with gateway_with(keys, registry=f"file://{tmp_path}/members.json") as gateway:
        async with left.listening(f"unix:{tmp_path}/left.sock"), right.listening(f"unix:{tmp_path}/right.sock"):
            flushed = await gateway.http.delete("/v1/prefix_cache", headers=keys.of("a"))
            assert flushed.json() == {"object": "prefix_cache.flushed", "freed_blocks": 6, "used_blocks": 2}
        [(left_pool, left_salt)], [(right_pool, right_salt)] = left.flushes, right.flushes
        assert (left_pool, right_pool, left_salt) == ("left", "right", right_salt)
        async with left.listening(f"unix:{tmp_path}/left.sock"):
            half = await gateway.http.delete("/v1/prefix_cache", headers=keys.of("a"))
        assert half.status_code == 503
