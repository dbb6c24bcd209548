"""K, V and weights as e4m3, asked for by the options of `octavo serve`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import completion
from support.tiny_models import prompt_of


@pytest.fixture
def cluster(tiny_model: PreparedModel) -> Iterator[Cluster]:
    settings = ServerSettings("frames", num_blocks=64, kv_cache_dtype="fp8", quantization="fp8")
    with running_cluster(tiny_model, settings) as running:
        yield running
        running.assert_idle()
        running.assert_undisturbed()


async def test_cached_blocks_of_e4m3_give_the_tokens_that_computed_ones_give(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    answers = [await completion(client, prompt_of(100), 24) for _ in range(2)]

    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 96]
    assert answers[0].choices[0].token_ids == answers[1].choices[0].token_ids
    assert len(answers[0].choices[0].token_ids) == 24
