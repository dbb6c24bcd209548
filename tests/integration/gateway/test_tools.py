"""Tools and reasoning on /v1/chat/completions: what the model is shown, and what the client gets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.gateway.openai_schema import Function
from octavo.gateway.tool_choice import calls_schema
from support.running_gateway import TOKENIZER, RunningGateway, running_gateway, says
from support.small_tokenizer import TOOL_CHAT_TEMPLATE, byte_level_json

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "2 + 3?"}]
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
    },
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
TOOLS: Any = [ADD, WEATHER]
CALLS = (
    '<think>Two calls.</think>Sure. <tool_call>{"name": "add", "arguments": {"a": [2, "x}"]}}</tool_call>\n'
    '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
)


@asynccontextmanager
async def gateway_saying(*texts: str, **settings: Any) -> AsyncIterator[RunningGateway]:
    script = says(*texts)
    async with running_gateway(script, chat_template=TOOL_CHAT_TEMPLATE, max_model_len=4096, **settings) as gateway:
        yield gateway


def prompt_of(gateway: RunningGateway) -> str:
    """The text of the last prompt."""
    text: str = TOKENIZER.decode(list(gateway.scheduler.submits[-1].prompt_token_ids), skip_special_tokens=False)
    return text


async def test_official_client_gets_calls_and_reasoning() -> None:
    async with gateway_saying(CALLS) as gateway:
        answer = await gateway.openai.chat.completions.create(model="m", messages=MESSAGES, tools=TOOLS)
    [choice] = answer.choices
    message = choice.message
    assert (choice.finish_reason, message.content) == ("tool_calls", "Sure.")
    assert message.model_extra == {"reasoning_content": "Two calls."}
    assert message.tool_calls is not None
    first, second = message.tool_calls
    assert first.type == second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == ("add", {"a": [2, "x}"]})
    assert (second.function.name, second.function.arguments) == ("get_weather", "{}")
    assert first.id != second.id
    assert '"description": "Adds."' in prompt_of(gateway)


@pytest.mark.parametrize("n", [1, 4])
async def test_stream_says_the_same_as_the_whole_answer(n: int) -> None:
    cut_off = '<think>Hm.</think><tool_call>{"name": "add", "arguments": {"a": 1'
    call_first = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    texts = [CALLS, "Plain </tool_call>", cut_off, call_first][:n]
    async with gateway_saying(*texts) as gateway:
        body = {"messages": MESSAGES, "tools": TOOLS, "n": n, "stop": ["zzzz"]}
        chunks = await gateway.chunks(CHAT, **body)
        answer = (await gateway.post(CHAT, **body)).json()
        async with gateway.openai.chat.completions.stream(model="m", messages=MESSAGES, tools=TOOLS, n=n) as stream:
            accumulated = await stream.get_final_completion()
    for choice in answer["choices"]:
        index, message = choice["index"], choice["message"]
        deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["delta"].get("role") for c in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        assert [c["finish_reason"] for c in deltas] == [*[None] * (len(deltas) - 1), choice["finish_reason"]]
        for field in ("content", "reasoning_content"):
            assert "".join(c["delta"].get(field) or "" for c in deltas) == (message.get(field) or "")
        same = accumulated.choices[index]
        assert same.finish_reason == choice["finish_reason"]
        calls = [(call.function.name, call.function.arguments) for call in same.message.tool_calls or []]
        assert calls == [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
        ]
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert reasons == ["tool_calls", "stop", "tool_calls", "tool_calls"][:n]


async def test_arguments_arrive_while_they_are_written() -> None:
    async with gateway_saying('<tool_call>{"name": "add", "arguments": {"a": "one two three"}}</tool_call>') as gateway:
        chunks = await gateway.chunks(CHAT, messages=MESSAGES, tools=TOOLS)
    pieces = [
        call["function"]["arguments"] for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert len(pieces) > 5
    assert "".join(pieces) == '{"a": "one two three"}'


async def test_tool_results_and_calls_of_the_history_reach_the_template() -> None:
    function = {"name": "add", "arguments": '{"a": 2}'}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    async with gateway_saying("5") as gateway:
        response = await gateway.post(CHAT, messages=history, tools=TOOLS)
        assert response.status_code == 200
        prompt = prompt_of(gateway)
    assert '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>' in prompt
    assert "<|im_start|>tool\n5<|im_end|>" in prompt


async def test_with_none_the_model_is_not_shown_the_tools() -> None:
    async with gateway_saying(CALLS) as gateway:
        answer = (await gateway.post(CHAT, messages=MESSAGES, tools=TOOLS, tool_choice="none")).json()
        assert "Adds." not in prompt_of(gateway)
    [choice] = answer["choices"]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)
    assert choice["message"]["content"].startswith("Sure. <tool_call>")


async def test_one_call_only_where_parallel_calls_are_off() -> None:
    async with gateway_saying(CALLS) as gateway:
        body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "include_reasoning": False}
        answer = (await gateway.post(CHAT, **body)).json()
    message = answer["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]
    assert "reasoning_content" not in message


async def test_reasoning_may_begin_in_the_prompt() -> None:
    async with gateway_saying("So.</think>Yes.") as gateway:
        body = {"messages": MESSAGES, "chat_template_kwargs": {"thinks": True}}
        message = (await gateway.post(CHAT, **body)).json()["choices"][0]["message"]
        assert prompt_of(gateway).endswith("<think>\n")
        plain = (await gateway.post(CHAT, messages=MESSAGES)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "So."}
    assert plain == {"role": "assistant", "content": "So.</think>Yes."}


async def test_reasoning_stays_in_the_text_if_the_setting_says_so() -> None:
    async with gateway_saying("<think>So.</think>Yes.", reasoning_parser="none") as gateway:
        message = (await gateway.post(CHAT, messages=MESSAGES)).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>So.</think>Yes."}


async def test_tokens_are_listed_once_also_where_their_text_is_held_back() -> None:
    async with gateway_saying(CALLS) as gateway:
        body = {"messages": MESSAGES, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
        chunks = await gateway.chunks(CHAT, **body)
        answer = (await gateway.post(CHAT, **body)).json()
    [choice] = answer["choices"]
    entries = [c for chunk in chunks for c in chunk["choices"]]
    assert [token for c in entries for token in c["token_ids"]] == choice["token_ids"]
    assert [entry for c in entries for entry in c["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": TOOLS * 100}, "tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with gateway_saying("x") as gateway:
        response = await gateway.post(CHAT, messages=MESSAGES, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_tools_need_a_template_that_takes_them() -> None:
    async with gateway_saying("x", tool_call_parser="none") as gateway:
        unknown = await gateway.post(CHAT, messages=MESSAGES, tools=TOOLS)
    async with running_gateway(says("x"), tool_call_parser="hermes") as gateway:
        untaken = await gateway.post(CHAT, messages=MESSAGES, tools=TOOLS)
    assert "--tool-call-parser" in unknown.json()["error"]["message"]
    assert "chat template takes none" in untaken.json()["error"]["message"]


@pytest.mark.parametrize(("depth", "status"), [(150, 200), (250, 400), (900, 400), (100_000, 400)])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_deep_schemas_are_refused_before_they_break_anything(path: str, depth: int, status: int) -> None:
    function = '"name":"add","parameters":{' + '"a":{' * depth + "}" * depth + "}"
    if path == CHAT:
        tool = f'{{"type":"function","function":{{{function}}}}}'
        body = f'{{"messages":[{{"role":"user","content":"x"}}],"tools":[{tool}]}}'
    else:
        body = f'{{"input":"x","tools":[{{"type":"function",{function}}}]}}'
    async with gateway_saying("x") as gateway:
        assert (await gateway.http.post(path, content=body)).status_code == status
        assert (await gateway.post(CHAT, messages=MESSAGES, tools=TOOLS)).status_code == 200


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """What grammars are compiled for."""
    (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    return tmp_path


async def test_a_demanded_call_binds_the_output(model_folder: Path) -> None:
    listed = '[{"name": "add", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]'
    async with gateway_saying(listed, model=model_folder) as gateway:
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
        chunks = await gateway.chunks(CHAT, **body)
        [choice] = (await gateway.post(CHAT, **body)).json()["choices"]
        rules = gateway.scheduler.submits[-1].params.rules
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert calls == [("add", '{"a": 1}'), ("get_weather", "{}")]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert rules is not None and '"get_weather"' in rules.grammar
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["function"]["name"] for call in deltas if "id" in call] == ["add", "get_weather"]


async def test_a_demanded_tool_gets_its_arguments(model_folder: Path) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    async with gateway_saying('{"a": 5}', model=model_folder, tool_call_parser="none") as gateway:
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "chat_template_kwargs": {"thinks": True}}
        [answered] = (await gateway.post(CHAT, **body)).json()["choices"]
        rules = gateway.scheduler.submits[-1].params.rules
    [call] = answered["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 5}'}
    assert "reasoning_content" not in answered["message"]
    assert rules is not None and '"required"' in rules.grammar


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}])
async def test_a_faulty_schema_is_named_where_a_call_is_demanded(model_folder: Path, choice: Any) -> None:
    faulty = {"name": "sub", "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}}
    async with gateway_saying("x", model=model_folder) as gateway:
        tools = [ADD, {"type": "function", "function": faulty}]
        chat = await gateway.post(CHAT, messages=MESSAGES, tools=tools, tool_choice=choice)
        called = choice if choice == "required" else {"type": "function", "name": "sub"}
        tools = [{"type": "function", "name": "add"}, {"type": "function", **faulty}]
        response = await gateway.post("/v1/responses", input="x", tools=tools, tool_choice=called)
        called = {"type": "any"} if choice == "required" else {"type": "tool", "name": "sub"}
        tools = [{"name": "add", "input_schema": {}}, {"name": "sub", "input_schema": faulty["parameters"]}]
        body = {"model": "m", "messages": MESSAGES, "tools": tools, "tool_choice": called, "max_tokens": 5}
        message = await gateway.post("/v1/messages", **body)
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "tools[1].function.parameters")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[1].parameters")
    assert message.status_code == 400
    assert message.json()["error"]["message"].startswith("tools[1].input_schema: ")


def test_references_of_a_tool_lead_to_its_own_schema() -> None:
    parameters = {"$defs": {"P": {"type": "object"}}, "properties": {"p": {"$ref": "#/$defs/P"}, "s": {"$ref": "#"}}}
    functions = [Function(name="a", parameters=parameters), Function(name="b")]
    schema = calls_schema(functions, 1)
    first = schema["$defs"]["tool_0"]
    assert first["properties"] == {"p": {"$ref": "#/$defs/tool_0/$defs/P"}, "s": {"$ref": "#/$defs/tool_0"}}
    assert (schema["maxItems"], schema["$defs"]["tool_1"]) == (1, {"type": "object"})
