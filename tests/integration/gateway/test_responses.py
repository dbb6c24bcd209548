"""OpenAI's Responses API, with the official client where it matters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from support.running_gateway import TOKENIZER, RunningGateway, ids_of, running_gateway, says
from support.scripted_scheduler import Answer
from support.small_tokenizer import TOOL_CHAT_TEMPLATE, byte_ids, byte_level_json

RESPONSES = "/v1/responses"
TOOLS: Any = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {}}},
        "strict": True,
    }
]
LOGPROBS: Any = ["message.output_text.logprobs"]
CALLS = (
    '<think>One call.</think>Sure. <tool_call>{"name": "add", "arguments": {"a": [2, 3]}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


@asynccontextmanager
async def gateway_saying(text: str, **settings: Any) -> AsyncIterator[RunningGateway]:
    async with running_gateway(says(text), chat_template=TOOL_CHAT_TEMPLATE, max_model_len=1024, **settings) as gateway:
        yield gateway


def prompt_of(gateway: RunningGateway) -> str:
    text: str = TOKENIZER.decode(list(gateway.scheduler.submits[-1].prompt_token_ids), skip_special_tokens=False)
    return text


async def events(gateway: RunningGateway, **body: Any) -> list[dict[str, Any]]:
    response = await gateway.post(RESPONSES, stream=True, **body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for number, event in enumerate(response.text.strip().split("\n\n")):
        name, _, data = event.partition("\ndata: ")
        found.append(orjson.loads(data))
        assert name == "event: " + found[-1]["type"]
        assert found[-1]["sequence_number"] == number
    return found


async def test_official_client_creates_retrieves_and_deletes() -> None:
    async with gateway_saying(" 5") as gateway:
        client = gateway.openai
        created = await client.responses.create(
            model="m", input="2 + 3?", instructions="Be short.", temperature=0.0, metadata={"a": "b"}
        )
        prompt = prompt_of(gateway)
        assert await client.responses.retrieve(created.id) == created
        items = await client.responses.input_items.list(created.id)
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await client.responses.cancel(created.id)
        await client.responses.delete(created.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(created.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(created.id)
    assert created.output_text == " 5"
    assert (created.status, created.object, created.metadata) == ("completed", "response", {"a": "b"})
    assert prompt.startswith("<|bos|><|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>")
    assert created.usage is not None
    assert created.usage.input_tokens == len(ids_of(prompt))
    assert created.usage.output_tokens == len(ids_of(" 5")) + 1
    [item] = items.data
    assert item.type == "message" and item.role == "user"


async def test_official_client_streams_reasoning_text_and_calls() -> None:
    async with gateway_saying(CALLS) as gateway:
        async with gateway.openai.responses.stream(model="m", input="x", tools=TOOLS) as stream:
            types = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        whole = await gateway.openai.responses.create(model="m", input="x", tools=TOOLS)
        stored = await gateway.openai.responses.retrieve(streamed.id)
    for response in (streamed, whole, stored):
        thought, message, first, second = response.output
        assert thought.type == "reasoning" and thought.content is not None
        assert thought.content[0].text == "One call."
        assert message.type == "message" and response.output_text == "Sure."
        assert first.type == second.type == "function_call"
        assert (first.name, first.arguments, second.arguments) == ("add", '{"a": [2, 3]}', "{}")
        assert {item.status for item in response.output if item.type != "reasoning"} == {"completed"}
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == len(ids_of("One call."))
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    assert types.count("response.output_item.added") == types.count("response.output_item.done") == 4


async def test_events_are_numbered_and_say_what_the_response_says() -> None:
    async with gateway_saying(CALLS) as gateway:
        found = await events(gateway, input="x", tools=TOOLS)
    response = found[-1]["response"]
    assert found[0]["response"]["status"] == "in_progress" and found[0]["response"]["output"] == []
    for index, item in enumerate(response["output"]):
        mine = [event for event in found if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added" and mine[0]["item"]["id"] == item["id"]
        assert mine[-1]["type"] == "response.output_item.done" and mine[-1]["item"] == item
        joined = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert joined == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        assert all(event["item_id"] == item["id"] for event in mine[1:-1])


async def test_log_probabilities_are_those_of_the_text_beside_them() -> None:
    answer = Answer([byte_ids("a 한 👍 zz")], tokens_per_step=2)
    body: Any = {"input": "x", "include": LOGPROBS, "top_logprobs": 2}
    async with running_gateway(lambda submit: answer, max_model_len=1024) as gateway:
        found = await events(gateway, **body)
        whole = await gateway.openai.responses.create(model="m", **body)
        stored = await gateway.openai.responses.retrieve(whole.id)
        bare = (await gateway.post(RESPONSES, input="x")).json()
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    for delta in deltas:
        assert b"".join(bytes(entry["bytes"]) for entry in delta["logprobs"]).decode() == delta["delta"]
    [done] = [event for event in found if event["type"] == "response.output_text.done"]
    entries = [entry for delta in deltas for entry in delta["logprobs"]]
    assert done["logprobs"] == entries == found[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert whole == stored
    [message] = whole.output
    assert message.type == "message" and message.content[0].type == "output_text"
    told = message.content[0].logprobs
    assert told is not None
    assert [entry.model_dump() for entry in told] == entries
    assert len(told) == len(byte_ids("a 한 👍 zz")), "all but the token that ends the text"
    assert [top.logprob for top in told[0].top_logprobs] == [-0.5, -1.5]
    assert (told[0].logprob, whole.top_logprobs) == (-0.5, 2)
    assert bare["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_log_probabilities_leave_out_reasoning_marks_and_calls(tokens_per_step: int) -> None:
    answer = Answer([byte_ids(CALLS)], tokens_per_step=tokens_per_step)
    async with running_gateway(lambda submit: answer, chat_template=TOOL_CHAT_TEMPLATE, max_model_len=1024) as gateway:
        found = await events(gateway, input="x", tools=TOOLS, include=LOGPROBS)
    [message] = [item for item in found[-1]["response"]["output"] if item["type"] == "message"]
    [content] = message["content"]
    assert content["text"] == "Sure."
    assert [entry["token"] for entry in content["logprobs"]] == list("Sure.")


async def test_a_response_goes_on_from_the_one_before() -> None:
    async with gateway_saying(CALLS) as gateway:
        first = (await gateway.post(RESPONSES, input="2 + 3?", instructions="Be short.", tools=TOOLS)).json()
        gateway.scheduler.script = says("5")
        call = first["output"][2]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "five"}
        second = await gateway.post(RESPONSES, input=[output], previous_response_id=first["id"], tools=TOOLS)
        assert second.status_code == 200, second.text
        prompt = prompt_of(gateway)
        listed = (await gateway.http.get(f"{RESPONSES}/{second.json()['id']}/input_items?order=asc&limit=4")).json()
        rest = (
            await gateway.http.get(f"{RESPONSES}/{second.json()['id']}/input_items?order=asc&after={listed['last_id']}")
        ).json()
    assert "Be short." not in prompt
    said = 'Sure.<tool_call>{"name": "add", "arguments": {"a": [2, 3]}}</tool_call>'
    assert f"<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n{said}" in prompt
    assert "<|im_start|>tool\nfive<|im_end|>" in prompt
    kinds = [item["type"] for item in listed["data"] + rest["data"]]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call", "function_call_output"]
    assert (listed["has_more"], rest["has_more"]) == (True, False)


async def test_the_end_says_what_was_cut() -> None:
    async with gateway_saying("a b c d e f") as gateway:
        found = await events(gateway, input="x", max_output_tokens=4)
        whole = (await gateway.post(RESPONSES, input="x", max_output_tokens=4)).json()
    for response in (found[-1]["response"], whole):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"
    assert found[-1]["type"] == "response.incomplete"


async def test_what_is_not_stored_cannot_be_gone_on_from() -> None:
    async with gateway_saying("x") as gateway:
        first = (await gateway.post(RESPONSES, input="x", store=False)).json()
        second = await gateway.post(RESPONSES, input="x", previous_response_id=first["id"])
    assert first["store"] is False
    error = second.json()["error"]
    assert (second.status_code, error["param"], error["code"]) == (404, "previous_response_id", "response_not_found")


async def test_a_failure_in_a_stream_is_an_event_and_is_not_stored() -> None:
    answer = Answer([ids_of("a b c d e f")], fails_after=3)
    async with running_gateway(lambda submit: answer, max_model_len=1024) as gateway:
        found = await events(gateway, input="x")
        stored = await gateway.http.get(f"{RESPONSES}/{found[0]['response']['id']}")
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"]["code"] == "internal_error"
    assert stored.status_code == 404


async def test_the_answer_comes_also_if_it_cannot_be_stored() -> None:
    async with gateway_saying("5", response_store_redis="redis://127.0.0.1:1/0") as gateway:
        created = (await gateway.post(RESPONSES, input="x")).json()
        asked = await gateway.http.get(f"{RESPONSES}/{created['id']}")
    assert (created["status"], created["store"]) == ("completed", False)
    assert (asked.status_code, asked.json()["error"]["code"]) == (503, "service_unavailable")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"input": []}, "input: List should have at least 1 item"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"max_output_tokens": 5000}, "maximum context length"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(fields: dict[str, Any], text: str) -> None:
    async with gateway_saying("x") as gateway:
        response = await gateway.post(RESPONSES, **{"input": "x", **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert text in error["message"]


async def test_the_text_may_be_given_a_form(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    schema = {"type": "object", "properties": {"zip": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    async with gateway_saying('{"zip": 5}', model=tmp_path) as gateway:
        response = (await gateway.post(RESPONSES, input="x", text={"format": form})).json()
        rules = gateway.scheduler.submits[-1].params.rules
        wrong = await gateway.post(RESPONSES, input="x", text={"format": {**form, "schema": {"type": 5}}})
    assert rules is not None and '"zip"' in rules.grammar
    assert response["text"]["format"] == form
    assert wrong.status_code == 400
    assert "text.format" in wrong.json()["error"]["message"]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=nothing"])
async def test_bad_parameters_of_a_list_are_named(query: str) -> None:
    async with gateway_saying("x") as gateway:
        created = (await gateway.post(RESPONSES, input="x")).json()
        response = await gateway.http.get(f"{RESPONSES}/{created['id']}/input_items?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])
