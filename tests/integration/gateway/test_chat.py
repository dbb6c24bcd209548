"""POST /v1/chat/completions over a real HTTP server, with the official client where it matters."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from support.running_gateway import MAX_MODEL_LEN, TOKENIZER, ids_of, running_gateway, says
from support.scripted_scheduler import Answer
from support.small_tokenizer import BOS, byte_ids

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Count: 1 2 3"}]
RENDERED = "<|bos|><|im_start|>user\nCount: 1 2 3<|im_end|>\n<|im_start|>assistant\n"
NUM_PROMPT_TOKENS = len(ids_of(RENDERED))


async def test_official_client_gets_an_answer() -> None:
    async with running_gateway(says(" 4 5 6")) as gateway:
        answer = await gateway.openai.chat.completions.create(model="m", messages=MESSAGES, max_completion_tokens=50)
    assert answer.choices[0].message.content == " 4 5 6"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == NUM_PROMPT_TOKENS
    assert answer.object == "chat.completion"


async def test_synchronous_client_streams() -> None:
    async with running_gateway(says(" 4 5 6")) as gateway:

        def read() -> str:
            url = f"http://127.0.0.1:{gateway.port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        assert await asyncio.to_thread(read) == " 4 5 6"


async def test_accumulating_helper_of_the_official_client_understands_the_stream() -> None:
    async with (
        running_gateway(says("the fox", "the lazy dog", "cat")) as gateway,
        gateway.openai.chat.completions.stream(
            model="m", messages=MESSAGES, n=3, stream_options={"include_usage": True}
        ) as stream,
    ):
        events = [event.type async for event in stream]
        completion = await stream.get_final_completion()
    assert [choice.message.content for choice in completion.choices] == ["the fox", "the lazy dog", "cat"]
    assert events.count("content.done") == 3
    assert completion.usage is not None
    assert completion.usage.completion_tokens > 3


@pytest.mark.parametrize("max_tokens", [1, 20])
async def test_role_stands_in_the_first_chunk_of_each_choice_only(max_tokens: int) -> None:
    async with running_gateway(says("the fox", "the dog", "cat")) as gateway:
        chunks = await gateway.chunks(CHAT, messages=MESSAGES, n=3, max_tokens=max_tokens)
    for index in range(3):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [c["delta"].get("role") for c in choices] == ["assistant", *[None] * (len(choices) - 1)]
        assert [c["finish_reason"] is not None for c in choices] == [*[False] * (len(choices) - 1), True]


async def test_role_is_sent_also_when_there_is_no_text() -> None:
    async with running_gateway(says("")) as gateway:
        chunks = await gateway.chunks(CHAT, messages=MESSAGES)
        answer = (await gateway.post(CHAT, messages=MESSAGES)).json()
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ""}


async def test_choice_0_comes_first_also_if_its_text_is_held_back() -> None:
    script = Answer([byte_ids("한 a"), byte_ids("the fox")])
    async with running_gateway(lambda submit: script) as gateway:
        chunks = await gateway.chunks(CHAT, messages=MESSAGES, n=2)
        async with gateway.openai.chat.completions.stream(model="m", messages=MESSAGES, n=2) as stream:
            completion = await stream.get_final_completion()
    assert chunks[0]["choices"][0]["index"] == 0
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [choice.message.content for choice in completion.choices] == ["한 a", "the fox"]
    for index in range(2):
        roles = [c["delta"].get("role") for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert roles == ["assistant", *[None] * (len(roles) - 1)]


async def test_start_token_stands_once() -> None:
    async with running_gateway(says("x")) as gateway:
        chat = (await gateway.post(CHAT, messages=MESSAGES, return_token_ids=True)).json()
        same = await gateway.complete(prompt=RENDERED, add_special_tokens=False, return_token_ids=True)
    assert chat["prompt_token_ids"] == same["choices"][0]["prompt_token_ids"] == ids_of(RENDERED)
    assert chat["prompt_token_ids"].count(TOKENIZER.token_to_id(BOS)) == 1


async def test_default_is_what_fits_the_model() -> None:
    async with running_gateway(says("x")) as gateway:
        await gateway.post(CHAT, messages=MESSAGES, ignore_eos=True)
    assert gateway.scheduler.submits[0].params.max_tokens == MAX_MODEL_LEN - NUM_PROMPT_TOKENS


async def test_stream_says_the_same_as_the_whole_answer() -> None:
    async with running_gateway(lambda submit: Answer([byte_ids("a 한 👍 zz stop it")])) as gateway:
        body = {"messages": MESSAGES, "stop": [" stop"], "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        chunks = await gateway.chunks(CHAT, **body)
        answer = (await gateway.post(CHAT, **body)).json()
    [choice] = answer["choices"]
    entries = [c for chunk in chunks for c in chunk["choices"]]
    assert "".join(c["delta"].get("content", "") for c in entries) == choice["message"]["content"] == "a 한 👍 zz"
    assert [e for c in entries for e in c["logprobs"]["content"]] == choice["logprobs"]["content"]
    assert [token for c in entries for token in c["token_ids"]] == choice["token_ids"]
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    for entry in entries[:-1]:
        data = b"".join(bytes(token["bytes"]) for token in entry["logprobs"]["content"])
        assert data.decode() == entry["delta"].get("content", "")


@pytest.mark.parametrize(
    ("stop", "text"),
    [([" 4 5 6 7"], ""), (" 6", " 4 5"), ([" 4 5 9"], " 4 5 6 7 8"), ([" 5 6 7", " 5 6", " 5"], " 4")],
)
async def test_stop_text_is_cut_exactly(stop: Any, text: str) -> None:
    async with running_gateway(says(" 4 5 6 7 8")) as gateway:
        chunks = await gateway.chunks(CHAT, messages=MESSAGES, stop=stop)
        [choice] = (await gateway.post(CHAT, messages=MESSAGES, stop=stop)).json()["choices"]
    deltas = [c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]]
    assert ("".join(deltas), choice["message"]["content"]) == (text, text)
    assert (chunks[-1]["choices"][0]["finish_reason"], choice["finish_reason"]) == ("stop", "stop")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_counts_so_far_stand_in_every_chunk_on_request(path: str) -> None:
    asked = {"messages": MESSAGES} if path == CHAT else {"prompt": [5, 6]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_gateway(says("the fox jumps over"), step_s=0.02) as gateway:
        chunks = await gateway.chunks(path, **asked, n=2, max_tokens=6, stream_options=options)
        alone = await gateway.chunks(path, **asked, max_tokens=6, stream_options={"continuous_usage_stats": True})
    num_prompt_tokens = NUM_PROMPT_TOKENS if path == CHAT else 2
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and len(set(counts)) > 2
    assert counts[0] <= 4 and counts[-1] == 12
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == num_prompt_tokens
        assert usage["total_tokens"] == num_prompt_tokens + usage["completion_tokens"]
    assert [chunk["usage"]["completion_tokens"] for chunk in alone][-1] == 6
    assert all(chunk["choices"] for chunk in alone)


async def test_counts_of_all_choices_come_in_a_chunk_of_their_own() -> None:
    async with running_gateway(says("the fox jumps over")) as gateway:
        body = {"messages": MESSAGES, "n": 2, "max_tokens": 3}
        chunks = await gateway.chunks(CHAT, **body, stream_options={"include_usage": True})
        without = await gateway.chunks(CHAT, **body)
        refused = await gateway.post(CHAT, **body, stream_options={"include_usage": True})
    usage = {"prompt_tokens": NUM_PROMPT_TOKENS, "completion_tokens": 6, "total_tokens": NUM_PROMPT_TOKENS + 6}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert all("usage" not in chunk and chunk["choices"] for chunk in without)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


async def test_messages_that_render_to_nothing_are_refused() -> None:
    async with running_gateway(says("x"), chat_template="{{ messages[0].content }}") as gateway:
        empty = await gateway.post(CHAT, messages=[{"role": "user", "content": ""}])
        other = await gateway.post(CHAT, messages=[{"role": "user", "content": "x"}])
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "messages")
    assert other.status_code == 200


async def test_log_probabilities_have_the_published_shape() -> None:
    async with running_gateway(says(" the")) as gateway:
        answer = await gateway.openai.chat.completions.create(
            model="m", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    the, end = logprobs.content
    assert (the.token, the.bytes, the.logprob) == (" the", [32, 116, 104, 101], -0.5)
    assert [top.logprob for top in the.top_logprobs] == [-0.5, -1.5]
    assert (end.token, end.bytes) == ("<|im_end|>", None)


async def test_messages_that_the_template_refuses_are_named() -> None:
    async with running_gateway(says("x")) as gateway:
        response = await gateway.post(CHAT, messages=[{"role": "tool", "content": "x"}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "no tools here" in response.json()["error"]["message"]


async def test_both_names_of_max_tokens_must_agree() -> None:
    async with running_gateway(says("the quick brown fox")) as gateway:
        same = await gateway.post(CHAT, messages=MESSAGES, max_tokens=2, max_completion_tokens=2)
        other = await gateway.post(CHAT, messages=MESSAGES, max_tokens=2, max_completion_tokens=3)
    assert same.json()["usage"]["completion_tokens"] == 2
    assert (other.status_code, other.json()["error"]["param"]) == (400, "max_tokens")
