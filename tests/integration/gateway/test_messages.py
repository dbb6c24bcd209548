"""Anthropic's Messages API, with the official client where it matters."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import orjson
import pytest

from support.running_gateway import TOKENIZER, RunningGateway, ids_of, running_gateway, says
from support.scripted_scheduler import Answer
from support.small_tokenizer import TOOL_CHAT_TEMPLATE

MESSAGES_PATH = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "2 + 3?"}]
TOOLS: Any = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}}}}]
CALLS = (
    '<think>One call.</think>Sure. <tool_call>{"name": "add", "arguments": {"a": [2, 3]}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


@asynccontextmanager
async def gateway_saying(text: str, **options: Any) -> AsyncIterator[RunningGateway]:
    script = says(text, **options)
    async with running_gateway(script, chat_template=TOOL_CHAT_TEMPLATE, max_model_len=1024) as gateway:
        yield gateway


@asynccontextmanager
async def official(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = f"http://127.0.0.1:{gateway.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def events(gateway: RunningGateway, **body: Any) -> list[dict[str, Any]]:
    response = await gateway.post(MESSAGES_PATH, stream=True, **{"model": "m", "max_tokens": 200, **body})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.strip().split("\n\n"):
        name, _, data = event.partition("\ndata: ")
        found.append(orjson.loads(data))
        assert name == "event: " + found[-1]["type"]
    return found


def prompt_of(gateway: RunningGateway) -> str:
    text: str = TOKENIZER.decode(list(gateway.scheduler.submits[-1].prompt_token_ids), skip_special_tokens=False)
    return text


async def test_official_client_gets_a_message() -> None:
    async with gateway_saying(" 5", num_cached_tokens=3) as gateway, official(gateway) as client:
        message = await client.messages.create(
            model="m", max_tokens=50, system="Be short.", messages=HELLO, extra_body={"temperature": 0.0, "top_k": 5}
        )
        prompt, params = prompt_of(gateway), gateway.scheduler.submits[0].params
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": " 5"}]
    assert (message.role, message.type, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "message",
        "end_turn",
        None,
    )
    assert prompt.startswith("<|bos|><|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2 + 3?")
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 5, 50)
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.input_tokens == len(ids_of(prompt)) - 3
    assert message.usage.output_tokens == len(ids_of(" 5")) + 1


async def test_official_client_streams_thinking_text_and_calls() -> None:
    async with gateway_saying(CALLS) as gateway, official(gateway) as client:
        async with client.messages.stream(model="m", max_tokens=300, messages=HELLO, tools=TOOLS) as stream:
            types = [event.type async for event in stream]
            streamed = await stream.get_final_message()
        whole = await client.messages.create(model="m", max_tokens=300, messages=HELLO, tools=TOOLS)
    for message in (streamed, whole):
        thought, text, first, second = message.content
        assert thought.type == "thinking" and thought.thinking == "One call."
        assert text.type == "text" and text.text == "Sure."
        assert first.type == second.type == "tool_use"
        assert (first.name, first.input, second.input) == ("add", {"a": [2, 3]}, {})
        assert message.stop_reason == "tool_use"
    assert streamed.usage == whole.usage
    assert types.count("content_block_start") == types.count("content_block_stop") == 4


async def test_events_come_in_the_published_order() -> None:
    async with gateway_saying("a b c d") as gateway:
        found = await events(gateway, messages=HELLO)
    types = [event["type"] for event in found]
    assert types[:3] == ["message_start", "ping", "content_block_start"]
    assert types[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(types[3:-3]) == {"content_block_delta"}
    assert "".join(event["delta"]["text"] for event in found[3:-3]) == "a b c d"
    assert found[0]["message"]["content"] == [] and found[0]["message"]["stop_reason"] is None
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"stop_sequences": [" c"]}, "stop_sequence", " c"),
        ({"max_tokens": 2}, "max_tokens", None),
        ({}, "end_turn", None),
    ],
)
async def test_stop_reason_is_the_same_in_both_ways(fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    async with gateway_saying("a b c d") as gateway:
        found = await events(gateway, messages=HELLO, **fields)
        body = {"model": "m", "max_tokens": 200, "messages": HELLO, **fields}
        whole = (await gateway.post(MESSAGES_PATH, **body)).json()
    assert found[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    streamed = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
    assert streamed == whole["content"][0]["text"]


async def test_turns_with_tools_reach_the_template() -> None:
    turns = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Sure."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": [2]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And?"},
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]},
            ],
        },
    ]
    async with gateway_saying("5") as gateway:
        body = {"model": "m", "max_tokens": 10, "messages": turns, "tools": TOOLS}
        response = await gateway.post(MESSAGES_PATH, **body)
        assert response.status_code == 200, response.text
        prompt = prompt_of(gateway)
        counted = await gateway.post(f"{MESSAGES_PATH}/count_tokens", model="m", messages=turns, tools=TOOLS)
    call = '<tool_call>{"name": "add", "arguments": {"a": [2]}}</tool_call>'
    assert f"assistant\nSure.{call}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>user\nAnd?" in prompt
    assert counted.json() == {"input_tokens": len(gateway.scheduler.submits[0].prompt_token_ids)}


async def test_an_answer_goes_on_from_the_text_it_is_given() -> None:
    async with gateway_saying(" 5") as gateway:
        turns = [*HELLO, {"role": "assistant", "content": "It is"}]
        message = (await gateway.post(MESSAGES_PATH, model="m", max_tokens=50, messages=turns)).json()
        assert prompt_of(gateway).endswith("<|im_start|>assistant\nIt is")
    assert message["content"] == [{"type": "text", "text": " 5"}]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "text"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": " "}]}, 400, "invalid_request_error", "continued"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0]",
        ),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0]: must not be empty"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"max_tokens": 5000}, 400, "invalid_request_error", "maximum context length"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "tool_choice.name"),
        ({"mcp_servers": []}, 400, "invalid_request_error", "mcp_servers"),
    ],
)
async def test_errors_have_their_shape(fields: dict[str, Any], status: int, kind: str, text: str) -> None:
    body = {"model": "m", "max_tokens": 10, "messages": HELLO, **fields}
    async with gateway_saying("x") as gateway:
        response = await gateway.post(MESSAGES_PATH, **{k: v for k, v in body.items() if v is not None})
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert text in error["error"]["message"]
    assert error["request_id"] == response.headers["x-request-id"]


async def test_official_client_raises_its_own_errors() -> None:
    async with gateway_saying("x") as gateway, official(gateway) as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="other", max_tokens=5, messages=HELLO)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(model="m", max_tokens=0, messages=HELLO)


async def test_a_failure_in_a_stream_is_an_event() -> None:
    answer = Answer([ids_of("a b c d e f")], fails_after=3)
    async with running_gateway(lambda submit: answer, max_model_len=1024) as gateway:
        found = await events(gateway, messages=HELLO)
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in json.dumps(found)


async def test_other_methods_and_paths_have_the_shape_too() -> None:
    async with gateway_saying("x") as gateway:
        response = await gateway.http.get(MESSAGES_PATH)
    assert (response.status_code, response.json()["type"]) == (405, "error")
