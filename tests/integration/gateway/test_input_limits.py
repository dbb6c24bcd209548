"""Inputs that ask for unbounded work are refused early, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from octavo.gateway import http_protocol
from octavo.gateway.http_protocol import MAX_HEAD_BYTES
from support.running_gateway import RunningGateway, running_gateway, says

MESSAGE = '{"role":"user","content":"a"}'
REQUEST = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"


def many(count: int, item: str) -> str:
    return "[" + ",".join([item] * count) + "]"


def names(count: int) -> str:
    return "{" + ",".join(f'"k{number}":1' for number in range(count)) + "}"


COSTLY: dict[str, tuple[str, str, str]] = {
    "unknown fields": ("/v1/completions", names(200_000), "more than 65536 values"),
    "wrong ids to stop at": ("/v1/completions", f'{{"prompt":[1],"stop_token_ids":{many(100_000, "[]")}}}', "values"),
    "biases": ("/v1/completions", f'{{"prompt":[1],"logit_bias":{names(200_000)}}}', "values"),
    "wrong ids to allow": (
        "/v1/completions",
        f'{{"prompt":[1],"allowed_token_ids":{many(200_000, "[]")}}}',
        "allowed_token_ids",
    ),
    "one id to allow, often": (
        "/v1/completions",
        f'{{"prompt":[1],"allowed_token_ids":{many(1_000_000, "1")}}}',
        "1000000 ids is above the limit",
    ),
    "ids": ("/v1/completions", f'{{"prompt":{many(2_000_000, "1")}}}', "maximum context length"),
    "prompts": ("/v1/completions", f'{{"prompt":{many(100_000, "[]")}}}', "at most 256"),
    "tools": ("/v1/chat/completions", f'{{"messages":[{MESSAGE}],"tools":{many(90_000, "{}")}}}', "values"),
    "variables": (
        "/v1/chat/completions",
        f'{{"messages":[{MESSAGE}],"chat_template_kwargs":{names(100_000)}}}',
        "values",
    ),
    "messages": ("/v1/chat/completions", f'{{"messages":{many(20_000, MESSAGE)}}}', "4096"),
    "deep variables": (
        "/v1/chat/completions",
        f'{{"messages":[{MESSAGE}],"chat_template_kwargs":{"[" * 500}{"]" * 500}}}',
        "nested more than 200",
    ),
    "items": ("/v1/responses", f'{{"input":{many(100_000, "{}")}}}', "values"),
    "blocks": ("/v1/messages", f'{{"model":"m","max_tokens":1,"messages":{many(100_000, "{}")}}}', "values"),
    "ids to detokenize": ("/detokenize", f'{{"tokens":{many(1_000_000, "5")}}}', "above the limit of 131072"),
    "deep prompt": ("/v1/completions", '{"prompt":' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON"),
}


@pytest.mark.parametrize("case", COSTLY)
async def test_what_costs_too_much_is_refused_before_it_costs(case: str) -> None:
    path, body, complaint = COSTLY[case]
    content = body.encode()
    async with running_gateway(says("x")) as gateway:
        start = time.process_time()
        answer = await gateway.http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert complaint in answer.json()["error"]["message"]
        assert time.process_time() - start < 5  # of both ends; a few tenths of a second on an idle machine
        served = await gateway.http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})
        assert served.status_code == 200


async def test_texts_with_many_commas_and_long_prompts_are_no_values() -> None:
    async with running_gateway(says("x"), max_model_len=100_000) as gateway:
        prompt = [5, 6, 7, 8] * 20_000
        for body in ({"prompt": prompt, "max_tokens": 1}, {"prompt": "a," * 40_000, "max_tokens": 1}):
            answer = await gateway.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text


async def raw(gateway: RunningGateway, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Whatever comes back on a bare connection to which these are written."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
    except ConnectionError:
        pass  # it was cut: what it said before is what counts
    try:
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        [REQUEST + b"x-long: "] + [b"a" * 2**20] * 4,
        [REQUEST] + [b"x-short: a\r\n" * 10_000] * 40,
        [b"GET /" + b"a" * 2**20] + [b"a" * 2**20] * 3,
    ],
    ids=["one header", "many headers", "address"],
)
async def test_a_head_without_end_is_cut_off(head: list[bytes]) -> None:
    async with running_gateway(says("x")) as gateway:
        answer = await raw(gateway, *head, pause_s=0.01)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), answer
        assert (await gateway.http.get("/health/live")).status_code == 200


async def test_a_large_head_within_the_limit_is_served() -> None:
    async with running_gateway(says("x")) as gateway:
        answer = await gateway.http.get("/health/live", headers={"x-long": "a" * (MAX_HEAD_BYTES - 4096)})
        assert answer.status_code == 200


async def test_a_head_that_comes_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 1.0)
    async with running_gateway(says("x")) as gateway:
        start = time.monotonic()
        answer = await raw(gateway, REQUEST[:8], REQUEST[8:16], REQUEST[16:], pause_s=0.05)
        assert answer.startswith(b"HTTP/1.1 408")
        assert time.monotonic() - start < 5
        assert await raw(gateway) == b"", "a connection on which nothing is said is closed"
        first = REQUEST + b"\r\n"
        answer = await raw(gateway, first, REQUEST)
        assert answer.count(b"HTTP/1.1 200") == 1 and answer.endswith(b"content-length: 0\r\n\r\n")


async def test_a_body_that_goes_on_after_its_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "REST_TIMEOUT_S", 0.5)
    async with running_gateway(says("x")) as gateway:
        head = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n"
        start = time.monotonic()
        answer = await raw(gateway, head, *[b"x"] * 99, pause_s=0.1)
        assert answer.startswith(b"HTTP/1.1 404") or answer == b""
        assert time.monotonic() - start < 6.0
        answer = await raw(gateway, head, b"x" * 99, REQUEST + b"connection: close\r\n\r\n", pause_s=0.3)
        assert answer.count(b"HTTP/1.1") == 2, "what comes in time leaves the connection as it was"


async def test_the_time_of_a_head_does_not_count_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with running_gateway(says("the quick brown fox"), step_s=0.15) as gateway:
        body: dict[str, Any] = {"prompt": [5], "max_tokens": 4}
        async with httpx.AsyncClient(base_url=gateway.http.base_url, trust_env=False) as client:
            for _ in range(2):
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                await asyncio.sleep(0.4)  # kept alive, with nothing said
            assert (await client.get("/health/live")).status_code == 200
