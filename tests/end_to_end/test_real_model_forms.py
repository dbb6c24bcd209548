"""SmolLM2 answers in a caller's class, by the official client's own helpers, also where no step is launched ahead."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]

QUESTION: Any = [{"role": "user", "content": "Which animal says meow, and how many legs does it have? Answer in JSON."}]


class Animal(BaseModel):
    """What the question asks for."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["cat", "dog", "spider"]
    num_legs: int = Field(ge=0, le=8)


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"], scope="module")
def cluster(request: pytest.FixtureRequest, real_model: PreparedModel) -> Iterator[Cluster]:
    settings = ServerSettings("local", max_num_seqs=8, max_model_len=512, pipeline_depth=request.param)
    with running_cluster(real_model, settings) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


async def test_all_helpers_parse_the_same_answer(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    options: Any = {"model": SERVED_NAME, "temperature": 0.0}
    chat = await client.chat.completions.parse(
        messages=QUESTION, response_format=Animal, n=2, max_tokens=60, seed=1, **options
    )
    first, second = (choice.message.parsed for choice in chat.choices)
    assert isinstance(first, Animal)
    assert first == second
    response = await client.responses.parse(
        input=QUESTION[0]["content"],
        text_format=Animal,
        max_output_tokens=60,
        include=["message.output_text.logprobs"],
        top_logprobs=1,
        **options,
    )
    assert response.output_parsed == first
    [message] = response.output
    assert message.type == "message" and message.content[0].type == "output_text"
    listed = message.content[0].logprobs
    assert listed is not None
    assert b"".join(bytes(entry.bytes) for entry in listed).decode() == response.output_text
    assert all(entry.logprob <= 0.0 for entry in listed)
    async with client.responses.stream(
        input=QUESTION[0]["content"], text_format=Animal, max_output_tokens=60, **options
    ) as stream:
        streamed = await stream.get_final_response()
    assert streamed.output_parsed == first


async def test_forms_and_free_texts_share_steps(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    async def free() -> str:
        answer = await client.completions.create(
            model=SERVED_NAME, prompt="The capital of France is", max_tokens=24, temperature=0.0
        )
        return answer.choices[0].text

    async def chosen(prompt: str, *names: str) -> str:
        answer = await client.completions.create(
            model=SERVED_NAME,
            prompt=prompt,
            max_tokens=24,
            temperature=0.0,
            best_of=2,
            extra_body={"structured_outputs": {"choice": list(names)}},
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    alone = await free()
    beside, capital, colour = await asyncio.gather(
        free(),
        chosen("The capital of France is", " Paris", " Pluto", " Porridge"),
        chosen("The colour of grass is", " green", " purple"),
    )
    assert beside == alone
    assert (capital, colour) == (" Paris", " green")
