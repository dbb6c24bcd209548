"""A model with two end tokens in its settings: both count as ends everywhere, and neither where ends are ignored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME
from support.tiny_models import TinyModel, prompt_of

FIRST_END, SECOND_END = 1, 77
PROMPTS = [prompt_of(9), prompt_of(600)]


@pytest.fixture(scope="module")
def cluster(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("two-ends")
    shutil.copytree(tiny_llama.folder, folder, dirs_exist_ok=True)
    Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": [FIRST_END, SECOND_END]}))
    with running_cluster(PreparedModel(folder, SERVED_NAME), ServerSettings("local")) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


async def tokens_and_end(client: openai.AsyncOpenAI, prompt: list[int], likely: int, **options: Any) -> Any:
    """Greedy, where one token is by far the likeliest."""
    [choice] = (
        await client.completions.create(
            model=SERVED_NAME,
            prompt=prompt,
            temperature=0.0,
            max_tokens=32,
            logit_bias={str(likely): 100},
            extra_body={"return_token_ids": True, **options},
        )
    ).choices
    return choice.token_ids, choice.finish_reason, choice.stop_reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", [FIRST_END, SECOND_END])
async def test_either_ends_at_once_and_neither_before_the_minimum(client: openai.AsyncOpenAI, end: int) -> None:
    for prompt in PROMPTS:
        assert await tokens_and_end(client, prompt, end) == ([end], "stop", None)
        tokens, reason, _ = await tokens_and_end(client, prompt, end, min_tokens=4)
        assert (len(tokens), tokens[-1], reason) == (5, end, "stop")
        assert not {FIRST_END, SECOND_END} & set(tokens[:4])


@pytest.mark.parametrize("end", [FIRST_END, SECOND_END])
async def test_both_are_ignored_unless_the_request_itself_stops_there(client: openai.AsyncOpenAI, end: int) -> None:
    ignored = await tokens_and_end(client, PROMPTS[0], end, ignore_eos=True)
    assert ignored == ([end] * 32, "length", None)
    asked_for = await tokens_and_end(client, PROMPTS[0], end, ignore_eos=True, stop_token_ids=[end])
    assert asked_for == ([end], "stop", end)
    other = await tokens_and_end(
        client, PROMPTS[0], end, ignore_eos=True, stop_token_ids=[FIRST_END + SECOND_END - end]
    )
    assert other == ([end] * 32, "length", None)
