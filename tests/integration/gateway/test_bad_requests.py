"""Requests that cannot be served: a 4xx that names the field, and the next request is served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from support.running_gateway import EOS_ID, MAX_MODEL_LEN, VOCAB_SIZE, RunningGateway, ids_of, running_gateway, says

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway(says("x")) as running:
        yield running


async def refused(gateway: RunningGateway, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    """The error of a request that must be refused before anything reaches the scheduler."""
    num_submits = len(gateway.scheduler.submits)
    response = await gateway.post(path, **body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(gateway.scheduler.submits) == num_submits
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_token_id_outside_the_embedding_is_refused_with_its_position(gateway: RunningGateway) -> None:
    for bad in (VOCAB_SIZE + 5000, -1, VOCAB_SIZE, 2**31, 1.5, True, None, 2**70):
        assert (await refused(gateway, COMPLETIONS, prompt=[5, bad], max_tokens=1))["param"] == "prompt[1]"
    assert (await refused(gateway, COMPLETIONS, prompt=[[5], [6, -1]]))["param"] == "prompt[1][1]"
    await gateway.complete(prompt=[VOCAB_SIZE - 1], max_tokens=1)


async def test_stop_token_id_outside_the_embedding_is_refused_with_its_position(gateway: RunningGateway) -> None:
    for bad in (VOCAB_SIZE, -1):
        error = await refused(gateway, COMPLETIONS, prompt=[5], stop_token_ids=[1, bad])
        assert error["param"] == "stop_token_ids[1]"
        assert str(bad) in error["message"]
    assert (await refused(gateway, COMPLETIONS, prompt=[5], stop_token_ids=[True]))["param"] == "stop_token_ids[0]"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt[0]"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (None, "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        (["a", [5]], "prompt[1]"),
        ([[5], 5], "prompt[1]"),
        ([None], "prompt[0]"),
    ],
)
async def test_prompt_that_is_empty_or_of_the_wrong_kind_is_named(
    gateway: RunningGateway, prompt: Any, param: str
) -> None:
    error = await refused(gateway, COMPLETIONS, prompt=prompt)
    assert error["param"] == param
    assert error["code"] == ("missing_required_parameter" if prompt is None else "invalid_value")
    await gateway.complete(prompt="x")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "top_p": 1e309}',
        b'{"prompt": "x"',
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"a":' * 3000,
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_body_that_is_no_json_gets_an_error_that_is(gateway: RunningGateway, path: str, body: bytes) -> None:
    response = await gateway.http.post(path, content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    await gateway.complete(prompt="x")


@pytest.mark.parametrize(
    "option",
    [
        "temperature",
        "top_p",
        "min_p",
        "typical_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "length_penalty",
        "timeout",
        "keep",
    ],
)
async def test_number_that_is_none_is_refused_in_any_spelling(gateway: RunningGateway, option: str) -> None:
    for value in (b"NaN", b"Infinity", b"-Infinity", b"1e309"):
        response = await gateway.http.post(COMPLETIONS, content=b'{"prompt": "x", "%s": %s}' % (option.encode(), value))
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    assert (await refused(gateway, COMPLETIONS, prompt="x", **{option: "nan"}))["param"] == option
    response = await gateway.http.post(COMPLETIONS, content=b'{"prompt": "x", "logit_bias": {"5": NaN}}')
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")
    await gateway.complete(prompt="x")


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
async def test_empty_stop_text_is_refused(gateway: RunningGateway, stop: Any) -> None:
    assert (await refused(gateway, COMPLETIONS, prompt="x", stop=stop))["param"].startswith("stop")
    assert (await gateway.complete(prompt="x", stop=[]))["choices"][0]["text"] == "x"
    assert (await gateway.complete(prompt="x", stop=None))["choices"][0]["text"] == "x"


async def test_length_is_checked_to_the_token() -> None:
    limit = MAX_MODEL_LEN
    async with running_gateway(says("the fox " * 40)) as gateway:
        answer = await gateway.complete(prompt=[5] * (limit - 1), max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == limit - 1
        assert answer["choices"][0]["finish_reason"] == "length"
        answer = await gateway.complete(prompt=[5] * (limit - 3))
        assert answer["usage"]["completion_tokens"] == 3
        for num_ids, max_tokens in ((limit, 1), (limit + 1, 1), (limit - 4, 5), (5, limit), (1, 10**6)):
            error = await refused(gateway, COMPLETIONS, prompt=[5] * num_ids, max_tokens=max_tokens)
            assert error["code"] == "context_length_exceeded"
            assert str(limit) in error["message"]
        error = await refused(gateway, COMPLETIONS, prompt=[5] * (limit - 4), max_tokens=5)
        assert f"{limit + 1} are requested" in error["message"]
        error = await refused(gateway, CHAT, messages=[{"role": "user", "content": "the fox " * 200}])
        assert error["code"] == "context_length_exceeded"


async def test_chat_without_max_tokens_fills_the_rest_of_the_context() -> None:
    async with running_gateway(says("the fox " * 100)) as gateway:
        response = await gateway.post(CHAT, messages=[{"role": "user", "content": "9" * (MAX_MODEL_LEN - 30)}])
    usage = response.json()["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "n": 1_000_000}, "n"),
        ({"prompt": "x", "n": 512}, "n"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
        ({"prompt": "x", "best_of": 1000}, "best_of"),
        ({"prompt": "x", "logprobs": 10**6}, "logprobs"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": [5] * 100, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": ["x"] * 10_000}, "prompt"),
        ({"prompt": "x", "stop": ["a"] * 5_000}, "stop"),
        ({"prompt": "x", "stop": "a" * 5_000}, "stop"),
        ({"prompt": "x", "stop_token_ids": [1] * 5_000}, "stop_token_ids"),
        ({"prompt": "x", "cache_salt": "a" * 5_000}, "cache_salt"),
    ],
)
async def test_request_for_unbounded_work_is_refused_by_name(
    gateway: RunningGateway, body: dict[str, Any], param: str
) -> None:
    assert (await refused(gateway, COMPLETIONS, **body))["param"] == param


async def test_body_that_is_too_large_is_refused(gateway: RunningGateway) -> None:
    async def without_length() -> Any:
        for _ in range(50):
            yield b" " * 2**20

    response = await gateway.http.post(COMPLETIONS, content=b" " * 50 * 2**20)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    response = await gateway.http.post(COMPLETIONS, content=without_length())
    assert response.status_code == 413
    await gateway.complete(prompt="x")


async def test_body_that_is_too_large_is_refused_before_it_comes(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.gateway.http_protocol.REST_TIMEOUT_S", 0.5)
    url = httpx.URL(gateway.http.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: m\r\ncontent-length: {2**40}\r\n\r\n"
    writer.write(head.encode() + b" " * 100)
    answered = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
    assert answered.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in answered
    writer.write(b" " * 2**20)  # what a client has under way does not cost it the answer
    assert await asyncio.wait_for(reader.read(), 5) == b"", "the connection ends after a while"
    writer.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "use_beam_search": True, "n": 2}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 33, "max_tokens": 32}, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias.-1"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"1000000000": 1}}, "logit_bias.1000000000"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(VOCAB_SIZE): 1}}, f"logit_bias.{VOCAB_SIZE}"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 1, "05": 1}}, "logit_bias.05"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias.5"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5, VOCAB_SIZE]}, "allowed_token_ids[1]"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [EOS_ID], "min_tokens": 1}, "min_tokens"),
        (COMPLETIONS, {"prompt": "x", "bad_words": [""]}, "bad_words[0]"),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["a", "b" * 300]}, "bad_words[1]"),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["b" * 200] * 12}, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"prompt": "x", "priority": 101}, "priority"),
        (COMPLETIONS, {"prompt": "x", "priority": -101}, "priority"),
        (COMPLETIONS, {"prompt": "x", "use_beam_search": True, "n": 2, "min_p": 0.1}, "min_p"),
        (COMPLETIONS, {"prompt": "x", "use_beam_search": True, "n": 2, "logit_bias": {"5": 1}}, "logit_bias"),
        (
            CHAT,
            {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}},
            "chat_template_kwargs.chat_template",
        ),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {f"a{i}": 1 for i in range(40)}}, "chat_template_kwargs"),
        (
            CHAT,
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"prompt": "x", "stream": True, "n": 0}, "n"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 'x' * 10**9 }}"}, "chat_template"),
    ],
)
async def test_option_that_does_not_fit_is_named_before_any_event(
    gateway: RunningGateway, path: str, body: dict[str, Any], param: str
) -> None:
    assert (await refused(gateway, path, **body))["param"] == param


async def test_other_model_is_not_found(gateway: RunningGateway) -> None:
    error = await refused(gateway, COMPLETIONS, 404, model="gpt-9", prompt="x")
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_unknown_paths_and_methods_get_the_same_error_shape(gateway: RunningGateway) -> None:
    missing = await gateway.http.get("/v1/nothing")
    wrong = await gateway.http.get(COMPLETIONS)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_prompt_text_is_counted_as_it_was_sent(gateway: RunningGateway) -> None:
    answer = await gateway.complete(prompt="the fox " * 9, add_special_tokens=False)
    assert answer["usage"]["prompt_tokens"] == len(ids_of("the fox " * 9))
