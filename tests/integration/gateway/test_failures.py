"""What clients see when something breaks, and what the scheduler sees when a client leaves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from octavo.common.messages.generation import Abort, Submit
from support.running_gateway import RunningGateway, ids_of, running_gateway, says
from support.scripted_scheduler import Answer
from support.waiting import eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": [5], "max_tokens": 100, "ignore_eos": True}
MESSAGES: Any = [{"role": "user", "content": "x"}]


async def leave_after(gateway: RunningGateway, body: dict[str, Any], num_events: int, wait_s: float = 0.0) -> None:
    """Send a request over a bare socket, read some events, close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    for _ in range(num_events):
        while not (await reader.readline()).startswith(b"data: "):
            pass
    await asyncio.sleep(wait_s)
    writer.close()


@pytest.mark.parametrize(
    ("options", "num_events", "is_stream"),
    [
        ({}, 5, True),
        ({}, 0, False),
        ({"never_starts": True}, 0, True),
        ({"never_starts": True}, 0, False),
        ({"pauses_after": 1}, 1, True),
        ({"pauses_after": 1}, 0, False),
    ],
    ids=["decode", "decode, whole", "queued", "queued, whole", "stuck", "stuck, whole"],
)
async def test_client_that_leaves_is_aborted_once_and_at_once(
    options: dict[str, Any], num_events: int, is_stream: bool
) -> None:
    async with running_gateway(says("the fox " * 50, **options), step_s=0.01) as gateway:
        await leave_after(gateway, {**LONG, "stream": is_stream, "n": 2}, num_events, wait_s=0.1)
        await eventually(lambda: gateway.scheduler.aborts == [Abort(1)])
        assert gateway.client.num_open_requests == 0
        gateway.scheduler.script = says("the fox")
        assert (await gateway.complete(prompt="x", max_tokens=1))["usage"]["completion_tokens"] == 1
        assert gateway.scheduler.aborts == [Abort(1)]


async def test_normal_ends_cause_no_abort() -> None:
    async with running_gateway(says("the fox")) as gateway:
        for start in range(0, 200, 20):
            requests = [gateway.complete(prompt=[start + index], max_tokens=3) for index in range(20)]
            await asyncio.gather(*requests)
        assert gateway.scheduler.aborts == []
        assert len(gateway.scheduler.submits) == 200


async def test_official_client_raises_on_an_error_inside_a_stream() -> None:
    async with running_gateway(says("the fox", fails_after=3, failure=("NUMERIC_ERROR", "not finite"))) as gateway:
        stream = await gateway.openai.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="not finite"):
            async for _ in stream:
                pass


async def test_failure_in_a_stream_is_one_event_and_the_end() -> None:
    async with running_gateway(says("the fox " * 9, fails_after=3, failure=("INTERNAL", "secret"))) as gateway:
        chunks = await gateway.chunks(COMPLETIONS, **LONG)
        whole = await gateway.post(COMPLETIONS, **LONG)
    assert ["error" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["error"]["code"] == "internal_error"
    assert whole.status_code == 500
    assert "secret" not in whole.text + str(chunks)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (("QUEUE_FULL", "full"), 429, "queue_full"),
        (("PROMPT_TOO_LONG", "never fits the pool"), 400, "context_length_exceeded"),
        (("NOT_READY", "no worker"), 503, "service_unavailable"),
        (("SOMETHING_NEW", "x"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_request_that_the_scheduler_refuses_gets_a_status_of_its_own(
    failure: tuple[str, str], status: int, code: str, is_stream: bool
) -> None:
    async with running_gateway(says("x", fails_after=0, failure=failure)) as gateway:
        response = await gateway.post(COMPLETIONS, prompt="x", stream=is_stream)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status in (429, 503))


async def test_one_failing_request_leaves_the_others_alone() -> None:
    def script(submit: Submit) -> Answer:
        is_bad = submit.prompt_token_ids == (9,)
        return Answer([[40, 41, 42, 43, 44]], fails_after=2 if is_bad else None)

    async with running_gateway(script) as gateway:
        body = {"max_tokens": 5, "return_token_ids": True}
        answers = await asyncio.gather(
            *(gateway.post(COMPLETIONS, prompt=[prompt], **body) for prompt in (7, 8, 9, 10, 11))
        )
    assert [answer.status_code for answer in answers] == [200, 200, 500, 200, 200]
    good = [answer.json()["choices"][0]["token_ids"] for answer in answers if answer.status_code == 200]
    assert good == [[40, 41, 42, 43, 44]] * 4


async def test_answers_go_on_at_the_next_scheduler() -> None:
    words = ids_of("the fox jumps over the lazy dog")

    def script(submit: Submit) -> Answer:
        num_known = len(submit.resumed[0].output_token_ids) if submit.resumed else 0
        return Answer([words[num_known:]], pauses_after=None if num_known else 3)

    async with running_gateway(script) as gateway:
        stream = asyncio.create_task(gateway.chunks(COMPLETIONS, prompt="x", max_tokens=100))
        whole = asyncio.create_task(gateway.post(COMPLETIONS, prompt="x", max_tokens=100))
        await eventually(lambda: gateway.scheduler.num_running == 2)
        await asyncio.sleep(0.05)
        gateway.scheduler.drop_link()
        async with asyncio.timeout(10):
            chunks, body = await stream, (await whole).json()
    texts = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    assert texts == body["choices"][0]["text"] == "the fox jumps over the lazy dog"
    assert body["usage"]["completion_tokens"] == len(words) + 1
    assert len(gateway.scheduler.submits) == 4


async def test_answers_end_with_an_error_when_no_scheduler_comes_back_in_time() -> None:
    async with running_gateway(says("the fox " * 9, pauses_after=3), recovery_timeout_s=0.3) as gateway:
        stream = asyncio.create_task(gateway.chunks(COMPLETIONS, **LONG))
        whole = asyncio.create_task(gateway.post(COMPLETIONS, **LONG))
        await eventually(lambda: gateway.scheduler.num_running == 2)
        await asyncio.sleep(0.05)
        gateway.scheduler.is_away = True
        gateway.scheduler.drop_link()
        async with asyncio.timeout(10):
            assert "error" in (await stream)[-1]
            assert (await whole).status_code == 503
        refused = await gateway.post(COMPLETIONS, prompt="x")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gateway.scheduler.is_away, gateway.scheduler.script = False, says("x")
        await eventually(lambda: not gateway.client.why_not_ready)
        assert (await gateway.complete(prompt="x"))["choices"][0]["text"] == "x"


async def test_waiting_limit_ends_a_queued_stream_with_an_explanation() -> None:
    async with running_gateway(says("x", never_starts=True), queue_timeout_s=0.2) as gateway:
        response = await gateway.post(COMPLETIONS, prompt="x", stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "0.2 s" in response.json()["error"]["message"]


async def test_stuck_stream_ends_with_an_error_event() -> None:
    async with running_gateway(says("the fox " * 9, pauses_after=2), token_timeout_s=0.2) as gateway:
        chunks = await gateway.chunks(COMPLETIONS, **LONG)
    assert chunks[-1]["error"]["code"] == "service_unavailable"


async def test_readiness_follows_the_scheduler_and_liveness_does_not() -> None:
    async with running_gateway(says("x")) as gateway:
        assert (await gateway.http.get("/health/ready")).status_code == 200
        gateway.scheduler.tell_status(False, "the worker is loading")
        await eventually(lambda: bool(gateway.client.why_not_ready))
        ready = await gateway.http.get("/health/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the worker is loading")
        assert (await gateway.http.get("/health/live")).status_code == 200


async def test_stop_lets_open_streams_end() -> None:
    async with running_gateway(says("the fox " * 9), step_s=0.01, drain_grace_s=5) as gateway:
        stream = asyncio.create_task(gateway.chunks(COMPLETIONS, **{**LONG, "max_tokens": 30}))
        await eventually(lambda: gateway.scheduler.num_running == 1)
        gateway.stop.request()
        await eventually(lambda: bool(gateway.client.why_not_ready))
        assert (await gateway.http.get("/health/ready")).status_code == 503
        assert (await gateway.post(COMPLETIONS, prompt="x")).status_code == 503
        assert (await stream)[-1]["choices"][0]["finish_reason"] == "length"
        async with asyncio.timeout(10):
            await gateway.serving


async def test_a_stop_is_told_to_balancers_before_requests_are_refused() -> None:
    async with running_gateway(says("the fox"), drain_delay_s=1.0) as gateway:
        began = asyncio.get_running_loop().time()
        gateway.stop.request()
        await eventually(lambda: bool(gateway.client.why_not_ready))
        ready = await gateway.http.get("/health/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "the server is shutting down")
        assert (await gateway.post(COMPLETIONS, prompt="x")).status_code == 200
        async with asyncio.timeout(10):
            await gateway.serving
        assert asyncio.get_running_loop().time() - began >= 1.0


async def test_stop_cuts_what_outlives_the_grace_with_an_error_event() -> None:
    async with running_gateway(says("the fox " * 9, pauses_after=3), drain_grace_s=0.2) as gateway:
        stream = asyncio.create_task(gateway.chunks(COMPLETIONS, **LONG))
        await eventually(lambda: gateway.scheduler.num_running == 1)
        gateway.stop.request()
        assert (await stream)[-1]["error"]["message"] == "the server is shutting down"
        async with asyncio.timeout(10):
            await gateway.serving
        assert gateway.scheduler.aborts == [Abort(1)]
