"""What the gateway asks the scheduler for, given the options of a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.common.messages.generation import SamplingParams
from octavo.common.messages.token_rules import TokenRules
from support.running_gateway import EOS_ID, MAX_MODEL_LEN, RunningGateway, ids_of, running_gateway, says

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "xyz"}]


async def params_of(gateway: RunningGateway, **options: Any) -> SamplingParams:
    await gateway.complete(prompt="x", **options)
    return gateway.scheduler.submits[-1].params


SHARED_OPTIONS: dict[str, Any] = {
    "n": 2,
    "best_of": 2,
    "use_beam_search": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"7": 3},
    "prompt_logprobs": 1,
    "stop": [" fox"],
    "include_stop_str_in_output": True,
    "stop_token_ids": ids_of(" fox"),
    "min_tokens": 3,
    "ignore_eos": True,
    "bad_words": ["fox"],
    "allowed_token_ids": [5, 6],
    "seed": 3,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 1,
    "priority": 3,
    "cache_salt": "s",
}
"""Each at a value that changes something."""


@pytest.mark.parametrize("name", SHARED_OPTIONS)
async def test_an_option_does_the_same_on_both_routes(name: str) -> None:
    given = {"stop": [" fox"]} if name == "include_stop_str_in_output" else {}
    text = "<|im_start|>a" if name == "skip_special_tokens" else "the fox jumps"
    outcomes = []
    async with running_gateway(says(text)) as gateway:
        for options in (given, {**given, name: SHARED_OPTIONS[name]}):
            for path, prompt in (("/v1/completions", {"prompt": "xyz"}), (CHAT, {"messages": MESSAGES})):
                body = {"temperature": 0.0, "seed": 1, "max_tokens": 4, "stop_token_ids": [9], **prompt, **options}
                answer = (await gateway.post(path, **body)).json()
                submit = gateway.scheduler.submits[-1]
                texts = [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]
                is_cut = len(submit.prompt_token_ids) == 1
                outcomes.append((submit.params, submit.priority, submit.cache_salt, is_cut, texts))
    plain_completion, plain_chat, completion, chat = outcomes
    assert plain_completion == plain_chat
    assert completion == chat
    assert completion != plain_completion


async def test_rules_are_sent_only_where_an_option_changes_something() -> None:
    neutral = {"min_p": 0, "typical_p": 1.0, "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}}
    async with running_gateway(says("x")) as gateway:
        assert (await params_of(gateway)).rules is None
        assert (await params_of(gateway, **neutral, bad_words=[], min_tokens=0, allowed_token_ids=None)).rules is None
        given = await params_of(
            gateway,
            min_p=0.1,
            typical_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=-1,
            repetition_penalty=1.25,
            logit_bias={"7": -100, "8": 1.5},
            allowed_token_ids=[9, 8, 9],
            min_tokens=3,
        )
    assert given.rules == TokenRules(
        allowed_token_ids=(8, 9),
        min_tokens=3,
        logit_bias=((7, -100.0), (8, 1.5)),
        repetition_penalty=1.25,
        frequency_penalty=-1.0,
        presence_penalty=0.5,
        min_p=0.1,
        typical_p=0.9,
    )


async def test_least_values_are_not_lost_on_the_way() -> None:
    """Between processes they are floats of 32 bits, in which 0.01 is less, and 1e-300 nothing."""
    async with running_gateway(says("x")) as gateway:
        given = await params_of(gateway, top_p=1e-300, typical_p=5e-324, repetition_penalty=0.01)
        assert (await params_of(gateway, top_p=0.9)).top_p == 0.9
    assert given.top_p == 2**-126 == np.float32(given.top_p)
    assert given.rules is not None
    assert given.rules.typical_p == 2**-126
    assert 0.01 <= np.float32(given.rules.repetition_penalty) == given.rules.repetition_penalty < 0.010000001


async def test_bad_word_is_forbidden_alone_and_after_a_space() -> None:
    async with running_gateway(says("x")) as gateway:
        rules = (await params_of(gateway, bad_words=["fox", " cat"])).rules
    assert rules is not None
    assert set(rules.bad_words) == {tuple(ids_of(text)) for text in ("fox", " fox", " cat")}


async def test_priority_goes_to_the_scheduler() -> None:
    async with running_gateway(says("x")) as gateway:
        await gateway.complete(prompt="x", priority=-7)
        await gateway.complete(prompt="x")
    assert [submit.priority for submit in gateway.scheduler.submits] == [-7, 0]


async def test_end_of_a_long_prompt_is_kept_and_what_was_cut_is_told() -> None:
    ids = [5 + index % 50 for index in range(MAX_MODEL_LEN + 40)]
    async with running_gateway(says("x")) as gateway:
        answer = await gateway.complete(prompt=ids, max_tokens=8, truncate_prompt_tokens=10)
        assert answer["usage"]["prompt_tokens"] == 10
        assert answer["usage"]["prompt_tokens_details"]["truncated_tokens"] == MAX_MODEL_LEN + 30
        await gateway.complete(prompt=ids, max_tokens=8, truncate_prompt_tokens=-1)
        whole = await gateway.complete(prompt=ids[:20], max_tokens=8, truncate_prompt_tokens=-1)
        refused = await gateway.post("/v1/completions", prompt=ids, max_tokens=8)
    lengths = [len(submit.prompt_token_ids) for submit in gateway.scheduler.submits]
    assert lengths == [10, MAX_MODEL_LEN - 8, 20]
    assert gateway.scheduler.submits[0].prompt_token_ids == tuple(ids[-10:])
    assert "truncated_tokens" not in whole["usage"]["prompt_tokens_details"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_no_stop_string_counts_before_min_tokens() -> None:
    async with running_gateway(says("\n" * 40)) as gateway:
        early = await gateway.complete(prompt="x", max_tokens=32, stop=["\n"])
        late = await gateway.complete(prompt="x", max_tokens=32, stop=["\n"], min_tokens=4)
    assert (early["usage"]["completion_tokens"], early["choices"][0]["text"]) == (1, "")
    assert (late["usage"]["completion_tokens"], late["choices"][0]["text"]) == (5, "\n" * 4)


async def test_tokens_of_log_probabilities_can_be_named_by_their_ids() -> None:
    async with running_gateway(says("the fox")) as gateway:
        answer = await gateway.complete(prompt="x", logprobs=1, return_tokens_as_token_ids=True)
        chat = await gateway.post(
            CHAT,
            messages=[{"role": "user", "content": "x"}],
            logprobs=True,
            top_logprobs=1,
            return_tokens_as_token_ids=True,
        )
    names = [f"token_id:{token_id}" for token_id in [*ids_of("the fox"), EOS_ID]]
    assert answer["choices"][0]["logprobs"]["tokens"] == names
    assert [entry["token"] for entry in chat.json()["choices"][0]["logprobs"]["content"]] == names


async def test_chat_can_go_on_inside_the_last_message() -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1 2"}]
    async with running_gateway(says(" 3")) as gateway:
        for options in ({}, {"continue_final_message": True}, {"add_generation_prompt": False}):
            response = await gateway.post(CHAT, messages=messages, return_token_ids=True, **options)
            assert response.status_code == 200, response.text
    shown = "<|bos|><|im_start|>user\nCount<|im_end|>\n<|im_start|>assistant\n1 2"
    ends = ["<|im_end|>\n<|im_start|>assistant\n", "", "<|im_end|>\n"]
    prompts = [list(submit.prompt_token_ids) for submit in gateway.scheduler.submits]
    assert prompts == [ids_of(shown + end) for end in ends]


@pytest.mark.parametrize("n", [1, 2])
async def test_chat_echoes_the_assistants_last_message(n: int) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1 2"}]
    async with running_gateway(says(" 3 4")) as gateway:
        body = {"messages": messages, "n": n, "echo": True, "continue_final_message": True}
        whole = (await gateway.post(CHAT, **body)).json()["choices"]
        chunks = await gateway.chunks(CHAT, **body)
        [plain] = (await gateway.post(CHAT, messages=messages[:1], echo=True)).json()["choices"]
    assert [choice["message"]["content"] for choice in whole] == ["1 2 3 4"] * n
    entries = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(n):
        deltas = [choice["delta"].get("content", "") for choice in entries if choice["index"] == index]
        assert (deltas[0][:3], "".join(deltas)) == ("1 2", "1 2 3 4")
    assert plain["message"]["content"] == " 3 4"


async def test_chat_adds_special_tokens_only_on_request() -> None:
    messages = [{"role": "user", "content": "x"}]
    async with running_gateway(says("x")) as gateway:
        for options in ({}, {"add_special_tokens": True}):
            await gateway.post(CHAT, messages=messages, **options)
    plain, added = (submit.prompt_token_ids for submit in gateway.scheduler.submits)
    assert added == (plain[0], *plain)


async def test_echo_begins_with_the_prompt_as_its_tokens_read() -> None:
    prompts = ["the fox 1 2", "é 3"]
    async with running_gateway(says(" 4 5")) as gateway:
        answer = await gateway.complete(prompt=prompts, n=2, echo=True, stop=["fox"], return_token_ids=True)
        assert [choice["text"] for choice in answer["choices"]] == [f"{text} 4 5" for text in prompts for _ in range(2)]
        assert answer["choices"][0]["token_ids"] == [*ids_of(" 4 5"), EOS_ID]
        assert answer["usage"]["completion_tokens"] == 4 * (len(ids_of(" 4 5")) + 1)
        shown = await gateway.complete(prompt="x", echo=True, skip_special_tokens=False)
        assert shown["choices"][0]["text"] == "<|bos|>x 4 5"
        stopped = await gateway.complete(prompt="x 4", echo=True, stop=[" 4"])
        assert stopped["choices"][0]["text"] == "x 4"
        chunks = await gateway.chunks("/v1/completions", prompt="the fox", echo=True)
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "the fox 4 5"


async def test_echo_of_the_prompt_alone_has_no_output() -> None:
    async with running_gateway(says(" 4 5")) as gateway:
        answer = await gateway.complete(prompt="the fox", echo=True, max_tokens=0)
        assert answer["choices"][0]["text"] == "the fox"
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
        chunks = await gateway.chunks("/v1/completions", prompt="the fox", echo=True, max_tokens=0)
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "the fox"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert [submit.params.max_tokens for submit in gateway.scheduler.submits] == [1, 1]
