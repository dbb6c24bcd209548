"""Clients that people have, against the whole system with a tiny model: what they read is what the server means."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME
from support.small_tokenizer import BOS, EOS, TOOL_CHAT_TEMPLATE, byte_level_tokenizer
from support.tiny_models import TinyModel

TOKENIZER = byte_level_tokenizer()
MESSAGES: Any = [{"role": "user", "content": "An octavo sheet"}]
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
GREEDY: Any = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The tiny model, with a template that takes tools."""
    folder = tmp_path_factory.mktemp("tiny-llama-tools")
    shutil.copytree(tiny_llama.folder, folder, dirs_exist_ok=True)
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TOOL_CHAT_TEMPLATE}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with running_cluster(PreparedModel(folder, SERVED_NAME), ServerSettings("local")) as running:
        yield running
        running.assert_idle()


@pytest.fixture
def official(server: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def text_of(official: openai.OpenAI) -> str:
    """What the model says to MESSAGES."""
    answer = official.chat.completions.create(model=SERVED_NAME, messages=MESSAGES, **GREEDY)
    text = answer.choices[0].message.content
    assert text
    return text


def test_openai_reads_the_same_on_every_route(official: openai.OpenAI) -> None:
    text = text_of(official)
    stream = official.chat.completions.create(model=SERVED_NAME, messages=MESSAGES, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    response = official.responses.create(
        model=SERVED_NAME, input=MESSAGES[0]["content"], temperature=0.0, max_output_tokens=12
    )
    assert (response.output_text, response.status) == (text, "incomplete")
    events = official.responses.create(
        model=SERVED_NAME, input=MESSAGES[0]["content"], temperature=0.0, max_output_tokens=12, stream=True
    )
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [model.id for model in official.models.list()] == [SERVED_NAME]


def test_a_response_goes_on_as_the_whole_conversation_would(official: openai.OpenAI) -> None:
    first = official.responses.create(model=SERVED_NAME, input="one two three", temperature=0.0, max_output_tokens=8)
    second = official.responses.create(
        model=SERVED_NAME, input="x", previous_response_id=first.id, temperature=0.0, max_output_tokens=8
    )
    turns: Any = [
        {"role": "user", "content": "one two three"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "x"},
    ]
    whole = official.chat.completions.create(model=SERVED_NAME, messages=turns, temperature=0.0, max_tokens=8)
    assert second.output_text == whole.choices[0].message.content
    assert second.usage is not None and whole.usage is not None
    assert second.usage.input_tokens == whole.usage.prompt_tokens


async def test_openai_async_streams_several_choices(server: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        options: Any = {"n": 3, "seed": 7, "max_tokens": 10, "messages": MESSAGES, "model": SERVED_NAME}
        async with client.chat.completions.stream(**options) as stream:
            async for _ in stream:  # asked for the end, the helper refuses one by length
                pass
            streamed = stream.current_completion_snapshot
        whole = await client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.message.content for choice in streamed.choices] == texts
    assert len(set(texts)) == 3


def test_openai_sends_tools_along(official: openai.OpenAI) -> None:
    plain = official.chat.completions.create(model=SERVED_NAME, messages=MESSAGES, **GREEDY)
    told = official.chat.completions.create(model=SERVED_NAME, messages=MESSAGES, tools=[ADD], **GREEDY)
    untold = official.chat.completions.create(
        model=SERVED_NAME, messages=MESSAGES, tools=[ADD], tool_choice="none", **GREEDY
    )
    assert plain.usage is not None and told.usage is not None and untold.usage is not None
    assert told.usage.prompt_tokens > plain.usage.prompt_tokens == untold.usage.prompt_tokens


SET_LIGHT: Any = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "$defs": {"State": {"enum": ["on", "off"]}},
            "type": "object",
            "properties": {"state": {"$ref": "#/$defs/State"}},
            "required": ["state"],
            "additionalProperties": False,
        },
    },
}
WITHOUT_SPACE: Any = {
    str(token_id): -100
    for token_id in range(TOKENIZER.get_vocab_size())
    if (text := TOKENIZER.decode([token_id])) and not text.strip()
}
"""A random model writes white space for ever where JSON allows it."""


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_light"}}])
def test_openai_gets_the_calls_that_it_demands(official: openai.OpenAI, choice: Any) -> None:
    options: Any = {
        "model": SERVED_NAME,
        "messages": MESSAGES,
        "tools": [SET_LIGHT],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 5,
        "max_tokens": 100,
        "logit_bias": WITHOUT_SPACE,
    }
    [whole] = official.chat.completions.create(**options).choices
    with official.chat.completions.stream(**options) as stream:
        [streamed] = stream.get_final_completion().choices
    for found in (whole, streamed):
        assert (found.finish_reason, found.message.content) == ("tool_calls", None)
        assert found.message.tool_calls is not None
        [call] = found.message.tool_calls
        assert call.type == "function" and call.function.name == "set_light"
        assert json.loads(call.function.arguments)["state"] in ("on", "off")


def test_anthropic_gets_the_call_that_it_demands(server: Cluster) -> None:
    tool: Any = {"name": "set_light", "input_schema": SET_LIGHT["function"]["parameters"]}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        message = client.messages.create(
            model=SERVED_NAME,
            max_tokens=600,
            messages=MESSAGES,
            tools=[tool],
            tool_choice={"type": "tool", "name": "set_light"},
        )
    [block] = message.content
    assert block.type == "tool_use" and block.name == "set_light"
    if message.stop_reason == "tool_use":
        assert block.input in ({"state": "on"}, {"state": "off"})
    else:  # white space up to the end
        assert (message.stop_reason, block.input) == ("max_tokens", {})


def test_anthropic_reads_what_openai_reads(server: Cluster, official: openai.OpenAI) -> None:
    text = text_of(official)
    body: Any = {"model": SERVED_NAME, "max_tokens": 12, "messages": MESSAGES, "extra_body": {"temperature": 0.0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        message = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_text()
        counted = client.messages.count_tokens(model=SERVED_NAME, messages=MESSAGES)
        with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
            client.messages.create(model=SERVED_NAME, max_tokens=100_000, messages=MESSAGES)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": text}]
    assert (streamed, message.stop_reason) == (text, "max_tokens")
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_langchain_reads_what_openai_reads(server: Cluster, official: openai.OpenAI) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model=SERVED_NAME, base_url=f"{server.url}/v1", api_key="none", max_retries=0, temperature=0.0, max_tokens=12
    )
    text = text_of(official)
    answer = chat.invoke("An octavo sheet")
    assert answer.content == text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12
    assert "".join(str(chunk.content) for chunk in chat.stream("An octavo sheet")) == text
    told = chat.bind_tools([ADD]).invoke("An octavo sheet")
    assert told.usage_metadata is not None
    assert told.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_litellm_reads_what_openai_reads(
    server: Cluster, official: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    options: Any = {
        "model": f"openai/{SERVED_NAME}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": MESSAGES,
        **GREEDY,
    }
    text = text_of(official)
    assert litellm.completion(**options).choices[0].message.content == text
    chunks = litellm.completion(stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**options, "max_tokens": 0})
