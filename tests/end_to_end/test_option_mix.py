"""Options in any company: an answer of the form that was asked for, or a refusal that names a field."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME
from support.tiny_models import prompt_of

NUM_REQUESTS, AT_ONCE = 150, 8
FORMS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"guided_regex": "[a-c]{3,5}-[0-9]{2}"}, "[a-c]{3,5}-[0-9]{2}"),
    ({"guided_choice": ["the fox", "zebra\n"]}, "the fox|zebra\n"),
    ({"structured_outputs": {"grammar": 'start: "<" /[0-9]/ ">"'}}, "<[0-9]>"),
    ({"guided_json": {"enum": [True, None]}}, r"\s*(true|null)\s*"),
]
OPTIONS: dict[str, list[Any]] = {
    "n": [2, 3],
    "best_of": [2, 4],
    "use_beam_search": [True],
    "stream": [True],
    "temperature": [0, 0.7, 1.5],
    "top_p": [0.5],
    "top_k": [3, 50],
    "min_p": [0.1],
    "typical_p": [0.8],
    "presence_penalty": [1],
    "frequency_penalty": [1],
    "repetition_penalty": [1.3],
    "logit_bias": [{"40": 5, "1": -100}],
    "logprobs": [0, 3],
    "prompt_logprobs": [0, 2],
    "echo": [True],
    "seed": [1],
    "stop": [["a"], ["-"]],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[45]],
    "min_tokens": [2],
    "ignore_eos": [True],
    "bad_words": [["b"]],
    "allowed_token_ids": [[40, 41]],
    "skip_special_tokens": [False],
    "truncate_prompt_tokens": [3, -1],
    "priority": [3, -3],
    "keep": [5],
    "return_token_ids": [True],
}
PROMPTS: list[Any] = ["Count", "x", ["Count", "Two"], *(prompt_of(length) for length in (1, 15, 16, 17, 40))]


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"], scope="module")
def cluster(request: pytest.FixtureRequest, tiny_model: PreparedModel) -> Iterator[Cluster]:
    """A pool for two or three of the sequences."""
    settings = ServerSettings(
        "local", max_num_seqs=8, block_size=8, num_blocks=24, num_host_blocks=60, pipeline_depth=request.param
    )
    with running_cluster(tiny_model, settings) as running:
        yield running
        running.assert_idle(within_s=10.0)
        running.assert_undisturbed()


def drawn(dice: random.Random, kept: list[str]) -> tuple[dict[str, Any], str]:
    """A request, and the pattern of its form."""
    form, pattern = dice.choice(FORMS)
    body = {"model": SERVED_NAME, "prompt": dice.choice(PROMPTS), "max_tokens": dice.choice([1, 5, 40, 80]), **form}
    body |= {name: dice.choice(values) for name, values in OPTIONS.items() if dice.random() < 0.1}
    if kept and dice.random() < 0.3:
        body |= {"prompt": dice.choice(["", "more"]), "branch": {"id": kept[-1]}}
    return body, pattern


def choices_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Of a whole answer, or joined from a stream's."""
    if not response.headers["content-type"].startswith("text/event-stream"):
        found: list[dict[str, Any]] = response.json()["choices"]
        return found
    texts: Counter[int] = Counter()
    joined: dict[int, dict[str, Any]] = {}
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            text = joined.get(choice["index"], {"text": ""})["text"] + choice["text"]
            joined[choice["index"]] = {**choice, "text": text}
            texts[choice["index"]] += choice["finish_reason"] is not None
    assert set(texts.values()) == {1}, "each choice has one end"
    return list(joined.values())


async def test_any_mix_is_answered_in_its_form_or_refused_by_name(cluster: Cluster) -> None:
    dice, kept, statuses, turns = random.Random(5), list[str](), Counter[int](), asyncio.Semaphore(AT_ONCE)

    async def ask(http: httpx.AsyncClient) -> None:
        async with turns:
            body, pattern = drawn(dice, kept)
            response = await http.post("/v1/completions", json=body)
            statuses[response.status_code] += 1
            if response.status_code != 200:
                assert response.status_code in (400, 404), (body, response.text)
                assert response.json()["error"]["param"] in (*body, "bad_words[0]"), (body, response.text)
                return
            if body.get("keep") and not body.get("stream") and isinstance(body["prompt"], str):
                kept.append(response.json()["id"])
            is_bare = not body.get("echo") and body.get("skip_special_tokens") is not False
            for choice in choices_of(response):
                if pattern and is_bare and (choice["finish_reason"], choice["stop_reason"]) == ("stop", None):
                    assert re.fullmatch(pattern, choice["text"]), (body, choice)

    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=120) as http:
        await asyncio.gather(*(ask(http) for _ in range(NUM_REQUESTS)))
    assert min(statuses[200], statuses[400]) > NUM_REQUESTS // 5
    assert cluster.metric("octavo_preemptions_total") > 0
