"""best_of, beam search and branches over HTTP, in front of a scripted scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from octavo.common.messages.generation import Abort, BranchPoint, Forget
from octavo.gateway.cache_salt import cache_salt
from support.running_gateway import RunningGateway, ids_of, running_gateway, says
from support.waiting import eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with running_gateway(says("the fox")) as running:
        yield running


async def refused(gateway: RunningGateway, **body: Any) -> dict[str, Any]:
    response = await gateway.post(COMPLETIONS, **body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_best_of_gives_the_choices_of_highest_mean_logprob_best_first() -> None:
    script = says("the fox", "a dog", "some cats", choice_logprobs=(-0.9, -0.2, -0.4))
    async with running_gateway(script) as gateway:
        answer = await gateway.complete(prompt="x", n=2, best_of=3, max_tokens=40)
    [submit] = gateway.scheduler.submits
    assert (submit.params.n, submit.params.num_logprobs) == (3, 0)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "a dog"), (1, "some cats")]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    num_generated = sum(len(ids_of(text)) + 1 for text in ("the fox", "a dog", "some cats"))
    assert answer["usage"]["completion_tokens"] == num_generated


async def test_best_of_counts_for_each_prompt_and_with_logprobs() -> None:
    script = says("one", "two", choice_logprobs=(-0.9, -0.2))
    async with running_gateway(script) as gateway:
        answer = await gateway.complete(
            prompt=["x", "y"], best_of=2, logprobs=1, return_token_ids=True, add_special_tokens=False
        )
    assert [choice["text"] for choice in answer["choices"]] == ["two", "two"]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [ids_of("x"), ids_of("y")]
    assert answer["choices"][0]["logprobs"]["token_logprobs"][0] == -0.2


async def test_the_official_client_sends_best_of(gateway: RunningGateway) -> None:
    answer = await gateway.openai.completions.create(model="m", prompt="x", best_of=3)
    assert len(answer.choices) == 1


async def test_a_beam_search_is_asked_for_with_its_options(gateway: RunningGateway) -> None:
    options = {"length_penalty": 0.5, "early_stopping": True, "logprobs": 2}
    answer = await gateway.complete(prompt="x", n=2, best_of=4, use_beam_search=True, **options)
    await gateway.complete(prompt="x", n=3, use_beam_search=True, temperature=0)
    first, second = [submit.params for submit in gateway.scheduler.submits]
    assert (first.n, first.beam_width, first.temperature) == (2, 4, 0.0)
    assert (first.length_penalty, first.early_stopping, first.num_logprobs) == (0.5, True, 2)
    assert (second.n, second.beam_width, second.length_penalty, second.early_stopping) == (3, 3, 1.0, False)
    assert [choice["text"] for choice in answer["choices"]] == ["the fox", "the fox"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"use_beam_search": True, "best_of": 17}, "best_of"),
        ({"use_beam_search": True, "n": 17}, "n"),
        ({"use_beam_search": True, "best_of": 2, "n": 3}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "stop": "a"}, "stop"),
        ({"use_beam_search": True, "length_penalty": 1e9}, "length_penalty"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"keep": 1e9}, "keep"),
        ({"keep": -1}, "keep"),
        ({"branch": {"id": ""}}, "branch.id"),
        ({"branch": {"id": "x", "choice": -1}}, "branch.choice"),
        ({"branch": {"id": "x", "num_tokens": 0}}, "branch.num_tokens"),
        ({"branch": {"choice": 1}}, "branch.id"),
    ],
)
async def test_options_at_odds_are_refused_by_name(gateway: RunningGateway, fields: dict[str, Any], param: str) -> None:
    assert (await refused(gateway, prompt="x", **fields))["param"] == param
    assert gateway.scheduler.submits == []


async def test_chat_offers_both() -> None:
    messages = [{"role": "user", "content": "x"}]
    script = says("the fox", "a dog", "some cats", choice_logprobs=(-0.9, -0.2, -0.4))
    async with running_gateway(script) as gateway:
        best = await gateway.post(CHAT, messages=messages, n=2, best_of=3)
        beams = await gateway.post(CHAT, messages=messages, n=3, use_beam_search=True, length_penalty=0.5)
        streamed = await gateway.post(CHAT, messages=messages, use_beam_search=True, stream=True)
        scored = await gateway.post(CHAT, messages=messages, use_beam_search=True, prompt_logprobs=1)
    best_params, beam_params = (submit.params for submit in gateway.scheduler.submits)
    assert (best_params.n, best_params.num_logprobs, best_params.beam_width) == (3, 0, 0)
    assert (beam_params.n, beam_params.beam_width, beam_params.length_penalty) == (3, 3, 0.5)
    contents = [choice["message"]["content"] for choice in best.json()["choices"]]
    assert (contents, best.json()["choices"][0]["logprobs"]) == (["a dog", "some cats"], None)
    assert len(beams.json()["choices"]) == 3
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    assert (scored.status_code, scored.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_a_branch_goes_on_from_a_kept_response() -> None:
    async with running_gateway(says("the fox", shared_token_ids=(5,) * 9, num_cached_tokens=8)) as gateway:
        kept = await gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], keep=5)
        response_id = kept.json()["id"]
        answer = await gateway.complete(branch={"id": response_id, "choice": 2, "num_tokens": 9}, prompt=" jumps")
        for nothing in ({}, {"prompt": ""}, {"prompt": []}):
            await gateway.complete(branch={"id": response_id}, **nothing)
    chat, branch, *bares = gateway.scheduler.submits
    assert (chat.keep_s, chat.branch) == (5.0, None)
    assert response_id == f"chatcmpl-{chat.request_id}"
    assert branch.branch == BranchPoint(chat.request_id, 2, 9)
    assert list(branch.prompt_token_ids) == ids_of(" jumps")  # and no start token in the middle
    assert [bare.prompt_token_ids for bare in bares] == [()] * 3
    assert {bare.branch for bare in bares} == {BranchPoint(chat.request_id, 0, None)}
    assert answer["usage"]["prompt_tokens"] == 9 + len(ids_of(" jumps"))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}


async def test_a_branch_of_what_is_gone_is_not_found() -> None:
    script = says("x", fails_after=0, failure=("UNKNOWN_RESPONSE", "no response 'r' with a choice 0"))
    async with running_gateway(script) as gateway:
        response = await gateway.post(COMPLETIONS, branch={"id": "cmpl-r"}, stream=True)
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": "no response 'r' with a choice 0",
        "type": "invalid_request_error",
        "param": "branch",
        "code": "response_not_found",
    }


async def test_a_kept_choice_that_ends_by_a_stop_string_tells_how_many_tokens_count() -> None:
    async with running_gateway(says("one two three four"), step_s=0.001) as gateway:
        answer = await gateway.complete(prompt="x", stop="two", keep=5)
        num_tokens = answer["usage"]["completion_tokens"]
        await eventually(lambda: gateway.scheduler.aborts == [Abort(1, 0, num_tokens)])


async def test_deleting_a_response_gives_up_what_it_keeps(gateway: RunningGateway) -> None:
    kept = await gateway.complete(prompt="x", keep=5, cache_salt="blue")
    deleted = await gateway.http.delete(f"{COMPLETIONS}/{kept['id']}", params={"cache_salt": "blue"})
    assert deleted.json() == {"id": kept["id"], "object": "text_completion.deleted", "deleted": True}
    chat = await gateway.http.delete("/v1/chat/completions/chatcmpl-other")
    assert chat.json() == {"id": "chatcmpl-other", "object": "chat.completion.deleted", "deleted": True}
    request_id = gateway.scheduler.submits[0].request_id
    forgotten = [Forget(request_id, cache_salt(b"", "", "blue")), Forget("other", cache_salt(b"", "", ""))]
    await eventually(lambda: gateway.scheduler.forgotten == forgotten)
