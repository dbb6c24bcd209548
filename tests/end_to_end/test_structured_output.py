"""Outputs of a given form, by the official client: always valid, beside free requests, and preempted."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from octavo.cli.models import PreparedModel
from octavo.worker.grammars import BoolArray, GrammarError, Matching
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME, output_ids
from support.small_tokenizer import byte_level_tokenizer
from support.tiny_models import prompt_of

SMALL_POOL = 20
TOKENIZER = byte_level_tokenizer()
WHITE = [i for i in range(TOKENIZER.get_vocab_size()) if (text := TOKENIZER.decode([i])) and not text.strip()]
DENSE = {str(token_id): -100 for token_id in WHITE}
"""Biases against white space, of which a random model writes as much as it may."""
MESSAGES: Any = [{"role": "user", "content": "Describe the fox."}]


class Fox(BaseModel):
    """Short enough for a model of random weights, which never wants to end a text."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "grey"]
    legs: int = Field(ge=0, le=8)
    tags: list[Literal["quick", "sly"]] = Field(max_length=2)


@pytest.fixture(params=[SMALL_POOL, pytest.param(200, marks=pytest.mark.full)], scope="module")
def cluster(request: pytest.FixtureRequest, tiny_model: PreparedModel) -> Iterator[Cluster]:
    """In this process with a pool for two sequences or so; or four processes with room for all."""
    transport: Any = "local" if request.param == SMALL_POOL else "frames"
    settings = ServerSettings(transport, max_num_seqs=16, block_size=8, num_blocks=request.param, num_host_blocks=100)
    with running_cluster(tiny_model, settings) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


async def complete(client: openai.AsyncOpenAI, prompt: Any = "Count", **options: Any) -> Any:
    names = ("n", "best_of", "seed", "temperature", "max_tokens", "stop", "logprobs")
    known = {name: options.pop(name) for name in names if name in options}
    return await client.completions.create(
        model=SERVED_NAME, prompt=prompt, extra_body=options, **{"max_tokens": 100, "temperature": 1.0, **known}
    )


async def test_parse_gives_objects_of_the_callers_class(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model=SERVED_NAME,
        messages=MESSAGES,
        response_format=Fox,
        n=6,
        temperature=1.5,
        seed=3,
        max_tokens=110,
        logit_bias=DENSE,
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Fox), choice
        assert choice.message.content is not None
        jsonschema.validate(json.loads(choice.message.content), Fox.model_json_schema())
        assert choice.finish_reason == "stop"
    assert len({choice.message.content for choice in answer.choices}) > 1


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"guided_regex": "[a-c]{3,5}-[0-9]{2}"}, r"[a-c]{3,5}-[0-9]{2}"),
        ({"structured_outputs": {"regex": "(yes|no), é!"}}, r"(yes|no), é!"),
        ({"guided_choice": ["the fox", 'a "cat"', "zebra\n"]}, 'the fox|a "cat"|zebra\n'),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"guided_grammar": 'root ::= "<" [0-9] ">" | "x" root'}, r"x*<[0-9]>"),
        ({"structured_outputs": {"grammar": 'start: "<" /[0-9]/ ">"'}}, r"<[0-9]>"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 5}}, r"\s*[345]\s*"),
        ({"structured_outputs": {"json": '{"enum": [true, null]}'}}, r"\s*(true|null)\s*"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_text_is_of_the_form(
    cluster: Cluster, client: openai.AsyncOpenAI, options: dict[str, Any], pattern: str
) -> None:
    answer = await complete(client, n=4, seed=1, **options)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text), choice.text


async def test_the_best_of_several_and_a_branch_are_of_the_form(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    pattern = "[a-c]{3,5}-[0-9]{2}"
    best = await complete(client, n=2, best_of=5, seed=1, logprobs=2, guided_regex=pattern, keep=30)
    for choice in best.choices:
        assert (choice.finish_reason, bool(re.fullmatch(pattern, choice.text))) == ("stop", True), choice.text
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens)
    assert best.usage.completion_tokens > sum(len(choice.logprobs.tokens) for choice in best.choices)
    branch = {"id": best.id, "choice": 0}
    for more in ("", "then"):
        answer = await complete(client, more, branch=branch, n=2, seed=2, guided_choice=["the fox", "zebra"])
        assert {choice.text for choice in answer.choices} <= {"the fox", "zebra"}
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(client, use_beam_search=True, n=2, temperature=0.0, guided_regex=pattern)
    assert refused.value.param == "use_beam_search"


async def test_text_that_is_cut_off_is_the_beginning_of_one(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    answer = await complete(client, guided_regex="[ab]{60,}", max_tokens=12)
    assert answer.choices[0].finish_reason == "length"
    assert re.fullmatch("[ab]+", answer.choices[0].text)
    answer = await complete(client, guided_regex="[ab]{40}c", stop=["aa", "bb", "ab", "ba"])
    assert (answer.choices[0].finish_reason, answer.choices[0].text) == ("stop", "")


async def test_any_object_is_json(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    """A random model may go on for long; what it ends is an object."""
    answers = await asyncio.gather(
        *(complete(client, response_format={"type": "json_object"}, seed=seed, max_tokens=60) for seed in range(4))
    )
    for answer in answers:
        [choice] = answer.choices
        assert choice.text.lstrip().startswith("{") or not choice.text.strip()
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)


async def test_free_rows_give_the_tokens_that_they_give_alone(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    prompts = [prompt_of(length) for length in (15, 16, 40)]
    alone = [await output_ids(client, prompt, 40, cache_salt="alone") for prompt in prompts]
    pattern = "([a-z]{2} ){8}"
    constrained = [complete(client, f"Row {seed}", guided_regex=pattern, seed=seed) for seed in range(6)]
    together = await asyncio.gather(*(output_ids(client, prompt, 40) for prompt in prompts), *constrained)
    assert list(together[:3]) == alone
    for answer in together[3:]:
        assert re.fullmatch(pattern, answer.choices[0].text)
    again = await asyncio.gather(
        *(complete(client, f"Row {seed}", guided_regex=pattern, seed=seed) for seed in range(6))
    )
    assert [answer.choices[0].text for answer in again] == [answer.choices[0].text for answer in together[3:]]
    if cluster.settings.num_blocks == SMALL_POOL:
        assert cluster.metric("octavo_preemptions_total") > 0


@pytest.mark.parametrize("num_read", [0, 5])
async def test_grammar_that_fails_in_the_worker_ends_its_own_request_only(
    cluster: Cluster, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, num_read: int
) -> None:
    """It passes the gateway, then the worker cannot compile it, or refuses the fifth token."""
    if cluster.settings.transport != "local":
        pytest.skip("the worker is in another process, where nothing can be replaced")
    read = Matching.read
    num_failed = 0

    def fail(matching: Matching, token_ids: Sequence[int]) -> BoolArray:
        nonlocal num_failed
        is_failing = "ab" in matching.grammar
        matching.num_read = getattr(matching, "num_read", 0) + len(token_ids)  # type: ignore[attr-defined]
        if is_failing and matching.num_read == num_read:  # type: ignore[attr-defined]
            num_failed += 1
            raise GrammarError("not this one")
        return read(matching, token_ids)

    monkeypatch.setattr(Matching, "read", fail)
    alone = await output_ids(client, prompt_of(15), 40, cache_salt="alone")
    free = asyncio.create_task(output_ids(client, prompt_of(15), 40))
    other = asyncio.create_task(complete(client, guided_regex="[cd]{20}"))
    with pytest.raises(openai.BadRequestError, match=r"guided_\*.* cannot be followed") as refused:
        await complete(client, guided_regex="[ab]{30}")
    assert refused.value.code == "invalid_grammar"
    assert num_failed == 1
    assert await free == alone
    assert re.fullmatch("[cd]{20}", (await other).choices[0].text)


async def test_free_rows_keep_their_pace_while_a_mask_takes_long(
    cluster: Cluster, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that takes a second is launched again and again; the others run on, and it gets there in the end."""
    if cluster.settings.transport != "local":
        pytest.skip("the worker is in another process, where nothing can be replaced")
    read = Matching.read
    is_slow = True

    def slowly(matching: Matching, token_ids: Sequence[int]) -> BoolArray:
        nonlocal is_slow
        if is_slow:
            is_slow = False
            time.sleep(1.0)
        return read(matching, token_ids)

    monkeypatch.setattr(Matching, "read", slowly)
    slow = asyncio.create_task(complete(client, guided_regex="[ab]{20}"))
    await asyncio.sleep(0.1)
    assert len((await output_ids(client, prompt_of(15), 40))[0]) == 40
    assert not slow.done()
    assert re.fullmatch("[ab]{20}", (await slow).choices[0].text)
