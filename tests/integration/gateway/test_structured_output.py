"""Grammars at the gateway: what is sent on, what is refused by name, and that nobody waits for a hostile one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from support.running_gateway import RunningGateway, ids_of, running_gateway, says
from support.small_tokenizer import byte_level_json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model, with its tokenizer only."""
    made: Path = tmp_path_factory.mktemp("model")
    (made / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(folder: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(says("x"), model=folder) as running:
        await running.complete(prompt="x", guided_regex="warm")
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def refused(gateway: RunningGateway, **body: Any) -> dict[str, Any]:
    response = await gateway.post(COMPLETIONS, prompt="refused", **body)
    assert response.status_code == 400, response.text
    assert ids_of("refused") not in [list(submit.prompt_token_ids[1:]) for submit in gateway.scheduler.submits]
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_forms_of_all_names_become_grammars(gateway: RunningGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    found = []
    for options in (
        {"guided_json": schema},
        {"structured_outputs": {"json": schema}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}},
    ):
        await gateway.complete(prompt="x", **options)
        found.append(gateway.scheduler.submits[-1].params.rules)
        assert (await gateway.post(CHAT, messages=MESSAGES, **options)).status_code == 200
        found.append(gateway.scheduler.submits[-1].params.rules)
    assert found[0] is not None
    assert '"a"' in found[0].grammar
    assert set(found) == {found[0]}
    for options in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"guided_json": None}):
        await gateway.complete(prompt="x", **options)
        assert gateway.scheduler.submits[-1].params.rules is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "bogus"}}, "guided_json"),
        ({"guided_json": {"if": {}}}, "guided_json"),
        ({"guided_regex": "a["}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
        ({"guided_grammar": "what is ::= ( this"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "a["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"other": 1}}, "structured_outputs.other"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"guided_regex": "a", "bad_words": ["b"]}, "bad_words"),
        ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(gateway: RunningGateway, body: dict[str, Any], param: str) -> None:
    assert (await refused(gateway, **body))["param"] == param


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"guided_grammar": "x"}, "guided_grammar: Expected ::= at line 1"),
        ({"guided_grammar": 'a ::= "b"'}, "guided_grammar: No 'root' rule found"),
        ({"guided_grammar": 'root ::= "\\'}, "guided_grammar: string index out of range"),
        ({"guided_grammar": "start: start"}, "guided_grammar: no text can be of it"),
        ({"guided_regex": "a("}, "guided_regex: unclosed group, in the pattern a("),
        ({"guided_json": {"pattern": "b{1"}}, "guided_json: unclosed counted repetition, in the pattern b{1"),
        ({"guided_regex": "(?=a)b"}, "guided_regex: look-around"),
    ],
)
async def test_fault_of_a_grammar_is_told(gateway: RunningGateway, body: dict[str, Any], reason: str) -> None:
    assert (await refused(gateway, **body))["message"].startswith(reason)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(depth):
        branch = {"type": "object", "properties": {f"a{level}": schema}, "required": [f"a{level}"]}
        schema = {"oneOf": [branch, {"type": "array", "items": schema}]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        nested(13),
        {"type": "string", "maxLength": 2**40},
        {"properties": {f"property{index}": {"type": "integer"} for index in range(10_000)}},
    ],
    ids=["refers to itself", "nested", "long", "wide"],
)
async def test_hostile_schema_is_refused_by_name(gateway: RunningGateway, schema: dict[str, Any]) -> None:
    assert (await refused(gateway, guided_json=schema))["param"] == "guided_json"


@pytest.mark.parametrize(
    "form",
    [
        {"guided_regex": "(x|y)*y(x|y){16}"},
        {"guided_regex": "(.*a){20}"},
        {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 2**62, "maxItems": 2**63}},
    ],
    ids=["doubles with each step", "many ways", "many items"],
)
async def test_form_that_explodes_when_it_is_made_whole_is_answered_in_time(
    gateway: RunningGateway, form: dict[str, Any]
) -> None:
    """Refused, or served by an automaton that is made as it is needed."""
    began = time.monotonic()
    response = await gateway.post(COMPLETIONS, prompt="x", **form)
    assert response.status_code in (200, 400), response.text
    assert time.monotonic() - began < 5.0  # two seconds and what other work on the machine takes


async def test_pattern_that_takes_seconds_is_refused_and_holds_up_nobody(folder: Path) -> None:
    """Requests beside it are served meanwhile, also with a grammar that is known already."""
    async with running_gateway(says("x"), model=folder, grammar_timeout_s=0.5) as gateway:
        await gateway.complete(prompt="x", guided_regex="warm")
        began = time.monotonic()
        slow = asyncio.create_task(refused(gateway, guided_regex="((a{1000}){1000}){1000}"))
        num_others = 0
        while not slow.done():
            await gateway.complete(prompt="x", guided_regex="warm")
            num_others += 1
        error = await slow
        assert error["param"] == "guided_regex"
        assert "takes more than 0.5 s" in error["message"]
        assert time.monotonic() - began < 15.0
        assert num_others >= 3
        await gateway.complete(prompt="x", guided_regex="after")
