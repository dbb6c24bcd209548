"""POST /v1/completions over a real HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from octavo.common.messages.generation import Abort, Submit
from octavo.gateway.cache_salt import cache_salt
from support.running_gateway import EOS_ID, TOKENIZER, ids_of, running_gateway, says
from support.scripted_scheduler import Answer
from support.small_tokenizer import BOS, byte_ids, id_of

COMPLETIONS = "/v1/completions"
BOS_ID = id_of(TOKENIZER, BOS)


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for chunk in chunks for c in chunk["choices"] if c["index"] == index)


async def test_answer_has_text_reason_and_counts() -> None:
    async with running_gateway(says(" 4 5 6", num_cached_tokens=3)) as gateway:
        answer = await gateway.complete(model="m", prompt="Count: 1 2 3", max_tokens=50)

    num_prompt, num_output = len(ids_of("Count: 1 2 3")) + 1, len(ids_of(" 4 5 6")) + 1  # a start and an end token
    assert answer["choices"] == [
        {"index": 0, "text": " 4 5 6", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert gateway.scheduler.aborts == []


async def test_default_is_sixteen_tokens() -> None:
    async with running_gateway(says("the fox " * 30)) as gateway:
        answer = await gateway.complete(prompt="x")
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_options_reach_the_scheduler_with_defaults_filled_in() -> None:
    async with running_gateway(says("x")) as gateway:
        await gateway.complete(prompt=[5, 6], seed=-1, top_k=-1, temperature=1e-9, cache_salt="s", stop_token_ids=[7])
        await gateway.complete(prompt=[5, 6], temperature=None, top_p=None, n=None, stop=None, logprobs=None)
    first, second = gateway.scheduler.submits
    assert (first.prompt_token_ids, first.cache_salt, first.params.stop_token_ids) == (
        (5, 6),
        cache_salt(b"", "", "s"),
        (7,),
    )
    assert (first.params.seed, first.params.top_k, first.params.temperature) == (2**64 - 1, 0, 0.0)
    assert (second.params.temperature, second.params.top_p, second.params.n) == (1.0, 1.0, 1)
    assert second.params.num_logprobs is None


async def test_prompts_without_a_seed_differ_in_theirs() -> None:
    async with running_gateway(says("x")) as gateway:
        await gateway.complete(prompt=[[5], [5]])
        await gateway.complete(prompt=[[5], [5]], seed=3)
    seeds = [submit.params.seed for submit in gateway.scheduler.submits]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [3, 3]


async def test_start_token_is_added_once_and_can_be_switched_off() -> None:
    async with running_gateway(says("x")) as gateway:
        await gateway.complete(prompt="the fox")
        await gateway.complete(prompt="the fox", add_special_tokens=False)
        await gateway.complete(prompt=ids_of("the fox"))
    prompts = [list(submit.prompt_token_ids) for submit in gateway.scheduler.submits]
    assert prompts == [[BOS_ID, *ids_of("the fox")], ids_of("the fox"), ids_of("the fox")]


def one_text_per_prompt(submit: Submit) -> Answer:
    [first, *_] = submit.prompt_token_ids
    return Answer([ids_of("the fox " * (first % 5) + f"p{first}c{choice}") for choice in range(submit.params.n)])


async def test_choice_of_a_list_of_prompts_is_found_by_its_index() -> None:
    async with running_gateway(one_text_per_prompt) as gateway:
        for first in range(10, 40, 3):
            prompts = [[first], [first + 1], [first + 2]]
            answer = await gateway.complete(prompt=prompts, n=2, temperature=0, max_tokens=60, return_token_ids=True)
            assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [
                p for p in prompts for _ in range(2)
            ]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
            ends = [choice["text"].rpartition(" ")[2] for choice in answer["choices"]]
            assert ends == [f"p{first + prompt}c{choice}" for prompt in range(3) for choice in range(2)]
            assert answer["usage"]["prompt_tokens"] == 3

            chunks = await gateway.chunks(COMPLETIONS, prompt=prompts, n=2, temperature=0, max_tokens=60)
            assert [text_of(chunks, index) for index in range(6)] == [c["text"] for c in answer["choices"]]


async def test_each_sample_of_a_stream_has_its_index_and_one_end() -> None:
    async with running_gateway(says("the fox", "the lazy dog", "cat")) as gateway:
        body = {"prompt": [5], "n": 3, "seed": 7, "max_tokens": 20}
        answer = await gateway.complete(**body)
        chunks = await gateway.chunks(COMPLETIONS, **body)
    assert [text_of(chunks, index) for index in range(3)] == [choice["text"] for choice in answer["choices"]]
    ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("text", ["👍🏽", "한국어", "cafe\u0301 x"])
async def test_character_split_over_tokens_is_sent_whole(text: str) -> None:
    async with running_gateway(lambda submit: Answer([byte_ids(text)])) as gateway:
        answer = await gateway.complete(prompt=[5], max_tokens=50)
        chunks = await gateway.chunks(COMPLETIONS, prompt=[5], max_tokens=50)
    assert answer["choices"][0]["text"] == text
    assert text_of(chunks) == text
    assert all("\ufffd" not in c["text"] for chunk in chunks for c in chunk["choices"])


async def test_answer_cut_inside_a_character_ends_in_one_replacement_mark() -> None:
    async with running_gateway(lambda submit: Answer([byte_ids("ok👍")])) as gateway:
        answer = await gateway.complete(prompt=[5], max_tokens=4)
        chunks = await gateway.chunks(COMPLETIONS, prompt=[5], max_tokens=4)
    assert answer["choices"][0] | {"logprobs": 0} == {
        "index": 0,
        "text": "ok\ufffd",
        "logprobs": 0,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert text_of(chunks) == "ok\ufffd"


@pytest.mark.parametrize(
    ("stop", "text", "stop_reason"),
    [
        ([" 4 5 6 7"], "", " 4 5 6 7"),
        (" 6", " 4 5", " 6"),
        ([" 4 5 9"], " 4 5 6 7 8", None),
        ([" 5 6 7", " 5 6", " 5"], " 4", " 5"),
        ([], " 4 5 6 7 8", None),
    ],
)
async def test_stop_text_is_cut_exactly(stop: Any, text: str, stop_reason: str | None) -> None:
    async with running_gateway(says(" 4 5 6 7 8")) as gateway:
        body = {"prompt": "Count: 1 2 3", "stop": stop, "temperature": 0, "max_tokens": 50}
        answer = await gateway.complete(**body)
        chunks = await gateway.chunks(COMPLETIONS, **body)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "stop", stop_reason)
    assert text_of(chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert gateway.scheduler.aborts == ([Abort(1, 0), Abort(2, 0)] if stop_reason else [])
    assert gateway.client.num_open_requests == 0


async def test_stop_text_ends_one_choice_and_the_others_go_on() -> None:
    async with running_gateway(says("one stop here", "two goes on")) as gateway:
        answer = await gateway.complete(prompt=[5], n=2, stop=" stop", max_tokens=50)
    assert [choice["text"] for choice in answer["choices"]] == ["one", "two goes on"]
    assert gateway.scheduler.aborts == [Abort(1, 0)]


async def test_stop_token_id_ends_the_text_also_with_ignore_eos() -> None:
    [end] = ids_of("9")
    async with running_gateway(says("the x9 fox")) as gateway:
        answer = await gateway.complete(prompt=[5], ignore_eos=True, max_tokens=50, stop_token_ids=[end])
        eos = await gateway.complete(prompt=[5], ignore_eos=True, max_tokens=50, stop_token_ids=[EOS_ID])
        ignored = await gateway.complete(prompt=[5], ignore_eos=True, max_tokens=50)
        shown = await gateway.complete(prompt=[5], ignore_eos=True, max_tokens=14, skip_special_tokens=False)
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", end)
    assert "9" not in answer["choices"][0]["text"]
    assert (eos["choices"][0]["text"], eos["choices"][0]["stop_reason"]) == ("the x9 fox", EOS_ID)
    assert (ignored["choices"][0]["text"], ignored["choices"][0]["finish_reason"]) == ("the x9 fox", "length")
    assert ignored["usage"]["completion_tokens"] == 50
    assert shown["choices"][0]["text"].startswith("the x9 fox<|im_end|><|im_end|>")


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_listed_tokens_belong_to_the_text_beside_them(tokens_per_step: int) -> None:
    text = "ab zz zzz 한 👍 end"
    script = Answer([byte_ids(text)], tokens_per_step=tokens_per_step)
    async with running_gateway(lambda submit: script) as gateway:
        body = {"prompt": [5], "stop": ["zzzzzz"], "logprobs": 2, "return_token_ids": True, "max_tokens": 100}
        chunks = await gateway.chunks(COMPLETIONS, **body, stream_options={"include_usage": True})
        answer = await gateway.complete(**body)
    entries = [choice for chunk in chunks for choice in chunk["choices"]]
    for entry in entries:
        assert TOKENIZER.decode(entry["token_ids"]) == entry["text"]
        assert len(entry["logprobs"]["tokens"]) == len(entry["token_ids"])
    [choice] = answer["choices"]
    assert [token for entry in entries for token in entry["token_ids"]] == choice["token_ids"]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == len(choice["token_ids"])
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for entry in entries for value in entry["logprobs"][name]] == choice["logprobs"][name]


async def test_log_probabilities_have_the_published_shape() -> None:
    async with running_gateway(says(" the fox")) as gateway:
        answer = await gateway.complete(prompt=[5], logprobs=2, max_tokens=2)
        bare = await gateway.complete(prompt=[5], logprobs=0, max_tokens=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [" the", " fox"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, 4]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2]
    assert logprobs["top_logprobs"][0][" the"] == -0.5
    assert bare["choices"][0]["logprobs"]["top_logprobs"] == [{" the": -0.5}]


async def test_token_ids_are_returned_on_request() -> None:
    async with running_gateway(says(" the fox")) as gateway:
        body = {"prompt": [[5, 6], [7]], "return_token_ids": True, "max_tokens": 2}
        answer = await gateway.complete(**body)
        chunks = await gateway.chunks(COMPLETIONS, **body)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5, 6], [7]]
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids_of(" the fox")] * 2
    first = [c for chunk in chunks for c in chunk["choices"] if "prompt_token_ids" in c]
    assert sorted((c["index"], c["prompt_token_ids"]) for c in first) == [(0, [5, 6]), (1, [7])]


async def test_counts_come_in_a_chunk_of_their_own_before_the_end() -> None:
    async with running_gateway(says("the fox jumps over", num_cached_tokens=1)) as gateway:
        body = {"prompt": [5, 6], "n": 2, "max_tokens": 3}
        chunks = await gateway.chunks(COMPLETIONS, **body, stream_options={"include_usage": True})
        without = await gateway.chunks(COMPLETIONS, **body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert all("usage" not in chunk and chunk["choices"] for chunk in without)


async def test_choices_may_exceed_the_slots_of_the_scheduler() -> None:
    async with running_gateway(says("x")) as gateway:
        answer = await gateway.complete(prompt=[5], n=100)
    assert len(answer["choices"]) == 100


async def test_ready_tokens_of_all_choices_leave_in_one_write() -> None:
    """A write is a chunk of HTTP's transfer encoding."""
    body = orjson.dumps({"model": "m", "prompt": "x", "max_tokens": 8, "n": 2, "stream": True})
    script = Answer([byte_ids("abcdefgh"), byte_ids("ijklmnop")], tokens_per_step=4)
    async with running_gateway(lambda submit: script, step_s=0.05) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        writes = []
        while size := int(await reader.readline(), 16):
            writes.append((await reader.readexactly(size + 2)).decode())
        writer.close()
    texts = [[orjson.loads(event)["choices"][0]["text"] for event in _events(write)] for write in writes]
    assert texts == [["abcd", "ijkl"], ["efgh", "mnop"], []]
    assert writes[-1] == "data: [DONE]\n\n\r\n"


def _events(write: str) -> list[str]:
    return [line.removeprefix("data: ") for line in write.splitlines() if line.startswith("data: {")]
