"""What bounds a request from outside: its deadline, its client, the size and pace of its body, what others hold."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.common.messages.generation import Abort
from octavo.gateway import completions
from octavo.gateway.generation import Generation
from octavo.gateway.openai_schema import CompletionRequest
from octavo.gateway.scheduler_client import SchedulerClient
from support.running_gateway import RunningGateway, running_gateway, says
from support.waiting import eventually

MESSAGES: Any = [{"role": "user", "content": "x"}]
LONG: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5], "max_tokens": 100, "ignore_eos": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 90, "ignore_eos": True},
    "/v1/responses": {"input": "x", "max_output_tokens": 90},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 90, "model": "m"},
}
FOX = "the fox " * 60
HEAD = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def fox(**options: Any) -> Any:
    return says(FOX, **options)


def trusting_client(context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=context, trust_env=False)


async def connect(gateway: RunningGateway, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """A bare connection with a request on its way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    content = json.dumps(body).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


@pytest.mark.parametrize("path", LONG)
@pytest.mark.parametrize(
    "options", [{}, {"never_starts": True}, {"pauses_after": 2}], ids=["decode", "queued", "stuck"]
)
async def test_a_stream_whose_client_leaves_is_aborted_at_once_on_every_route(
    path: str, options: dict[str, Any]
) -> None:
    async with running_gateway(fox(**options), step_s=0.01) as gateway:
        reader, writer = await connect(gateway, path, {**LONG[path], "stream": True})
        await eventually(lambda: gateway.scheduler.num_running == 1)
        if "never_starts" not in options:
            assert b"200" in await reader.readline()
        writer.close()
        await eventually(lambda: gateway.scheduler.aborts == [Abort(1)])
        assert (gateway.client.num_open_requests, gateway.scheduler.num_running) == (0, 0)


@pytest.mark.parametrize("path", LONG)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_ends_a_request_with_a_typed_error_and_frees_it(path: str, is_stream: bool) -> None:
    async with running_gateway(fox(), step_s=0.05) as gateway:
        body = {**LONG[path], "stream": is_stream, "timeout": 0.8}
        started = asyncio.get_running_loop().time()
        answer = await gateway.post(path, **body)
        elapsed_s = asyncio.get_running_loop().time() - started
        assert gateway.scheduler.aborts == [Abort(1)]
        assert gateway.client.num_open_requests == 0
    assert 0.8 <= elapsed_s < 4.0, "the whole answer takes 4.5 s"
    if is_stream:
        assert answer.status_code == 200
        assert "fox" in answer.text
        assert ("timeout_error" if path == "/v1/messages" else "deadline_exceeded") in answer.text
        assert "not ended within its time" in answer.text
    else:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
        error = answer.json()["error"]
        assert error["type"] == "timeout_error"
        assert path == "/v1/messages" or error["code"] == "deadline_exceeded"


async def test_a_queued_request_meets_its_deadline_and_the_official_client_tells_it() -> None:
    async with running_gateway(fox(never_starts=True), default_timeout_s=0.2, max_timeout_s=10) as gateway:
        with pytest.raises(openai.APIStatusError, match="not ended within its time") as raised:
            await gateway.openai.completions.create(model="m", prompt="x")
        assert raised.value.status_code == 408
        gateway.scheduler.script = says("the quick")
        patient = await gateway.post("/v1/completions", prompt="x", timeout=10)
        assert patient.status_code == 200
        for timeout, word in ((11, "limit of 10"), (0, "greater than 0"), (-1, "greater than 0")):
            refused = await gateway.post("/v1/completions", prompt="x", timeout=timeout)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout")
            assert word in refused.text


async def test_a_deadline_that_is_kept_leaves_no_trace() -> None:
    async with running_gateway(says("the quick")) as gateway:
        await gateway.complete(prompt="x", max_tokens=2, timeout=1.5)
        await asyncio.sleep(1.6)
        assert gateway.scheduler.aborts == []


async def test_bodies_that_come_too_slowly_are_refused() -> None:
    async with running_gateway(says("x"), body_timeout_s=0.3) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        async with asyncio.timeout(10):
            assert b" 408 " in await reader.readline()
            assert b"body_timeout" in await reader.read()
        writer.close()
        assert (await gateway.complete(prompt="x"))["choices"]


async def test_bodies_that_are_too_much_together_are_refused_until_some_are_answered() -> None:
    async with running_gateway(fox(never_starts=True), max_buffered_body_bytes=3000) as gateway:
        body = {"prompt": [5], "max_tokens": 1, "user": "u" * 1000}
        held = [await connect(gateway, "/v1/completions", body) for _ in range(2)]
        await eventually(lambda: gateway.scheduler.num_running == 2)
        refused = await gateway.post("/v1/completions", **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        for _, writer in held:
            writer.close()
        await eventually(lambda: gateway.scheduler.num_running == 0)
        gateway.scheduler.script = says("x")
        for _ in range(3):
            assert (await gateway.post("/v1/completions", **body)).status_code == 200


async def test_a_client_that_takes_nothing_is_cut_off_and_frees_everything() -> None:
    async with running_gateway(fox(), step_s=0.1, stalled_client_timeout_s=0.5) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", gateway.port))
            body = {**LONG["/v1/completions"], "n": 128, "logprobs": 20, "stream": True}
            content = json.dumps(body).encode()
            await loop.sock_sendall(client, f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
            await eventually(lambda: len(gateway.scheduler.submits) == 1)
            await eventually(lambda: gateway.scheduler.aborts == [Abort(1)], within_s=20)
            assert gateway.client.num_open_requests == 0


async def test_a_client_that_reads_too_slowly_holds_a_bounded_number_of_tokens_and_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.gateway.generation_job.MAX_UNREAD_TOKENS", 21 * 500)
    async with running_gateway(fox(), step_s=0.005) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", gateway.port))
            body = {**LONG["/v1/completions"], "n": 128, "logprobs": 20, "stream": True}
            content = json.dumps(body).encode()
            await loop.sock_sendall(client, f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
            await eventually(lambda: len(gateway.scheduler.submits) == 1)
            others = [
                asyncio.create_task(gateway.complete(prompt="x", max_tokens=90, ignore_eos=True)) for _ in range(3)
            ]
            most = 0
            while not gateway.scheduler.aborts:
                most = max([most, *(len(generation._events) for generation in generations(gateway))])
                await asyncio.sleep(0.001)
            assert 128 < most <= 500
            for other in await asyncio.gather(*others):
                assert other["usage"]["completion_tokens"] == 90
            assert (gateway.scheduler.aborts, gateway.client.num_open_requests) == ([Abort(1)], 0)
            received = b""
            async with asyncio.timeout(10):
                while b"0\r\n\r\n" not in received[-8:]:
                    received += await loop.sock_recv(client, 2**16)
            assert b"the client left more than 500 tokens unread" in received[-1000:]


def generations(gateway: RunningGateway) -> set[Generation]:
    groups = gateway.client._groups.values()
    return {part.generation for group in groups for part in group.client._parts.values()}


async def test_scripts_of_other_origins_may_call_where_they_are_allowed() -> None:
    async with running_gateway(says("x"), cors_origins="https://a.example,https://b.example") as gateway:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for origin, allowed in (("https://b.example", "https://b.example"), ("https://c.example", None)):
            preflight = await gateway.http.options("/v1/completions", headers={"origin": origin, **asks})
            assert preflight.headers.get("access-control-allow-origin") == allowed
        answer = await gateway.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={"origin": "https://a.example"}
        )
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "x-ratelimit-remaining-requests" in answer.headers["access-control-expose-headers"]
    async with running_gateway(says("x")) as gateway:
        answer = await gateway.http.get("/v1/models", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers


async def test_https_is_served_and_asks_for_a_certificate_of_the_client_where_it_should(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (Debian: apt-get install openssl)")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    await asyncio.to_thread(subprocess.run, [*command.split(), *names], check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=str(cert))
    tls: dict[str, Any] = {"tls_cert": cert, "tls_key": key}
    async with running_gateway(says("x"), **tls) as gateway, trusting_client(trusting) as http:
        assert (await http.get(f"https://127.0.0.1:{gateway.port}/v1/models")).status_code == 200
    async with running_gateway(says("x"), tls_client_ca=cert, **tls) as gateway:
        url = f"https://127.0.0.1:{gateway.port}/v1/models"
        async with trusting_client(trusting) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(url)
        trusting.load_cert_chain(cert, key)
        async with trusting_client(trusting) as http:
            assert (await http.get(url)).status_code == 200


async def test_of_requests_that_come_at_once_each_is_submitted_before_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_parsed, parsed_at_submit = 0, []
    parse, submit = completions.parse_completion, SchedulerClient.submit

    def count_parsed(body: bytes) -> CompletionRequest:
        nonlocal num_parsed
        num_parsed += 1
        return parse(body)

    def note_submit(client: SchedulerClient, *arguments: Any) -> Generation:
        parsed_at_submit.append(num_parsed)
        return submit(client, *arguments)

    monkeypatch.setattr(completions, "parse_completion", count_parsed)
    monkeypatch.setattr(SchedulerClient, "submit", note_submit)
    async with running_gateway(fox()) as gateway:
        content = json.dumps(LONG["/v1/completions"]).encode()
        connections = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(60)]
        for _, writer in connections:
            writer.write(f"{HEAD}content-length: {len(content)}\r\n\r\n".encode() + content)
        await eventually(lambda: len(parsed_at_submit) == 60)
        for _, writer in connections:
            writer.close()

    assert parsed_at_submit == list(range(1, 61))
