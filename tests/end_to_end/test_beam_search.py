"""The whole system gives the answers of transformers' beam search."""

from __future__ import annotations

import asyncio

import openai
import pytest
import pytest_asyncio
import transformers

from octavo.cli.models import PreparedModel
from support.beam_references import BeamCase, server_answers, transformers_answers
from support.clusters import Cluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME
from support.reference_tokens import Reference
from support.tiny_models import TinyModel, prompt_of

TINY_SETTINGS = [
    ServerSettings("frames", max_num_seqs=32),
    ServerSettings("local", max_num_seqs=6, max_num_batched_tokens=16, num_blocks=80, max_model_len=512),
]


@pytest.mark.parametrize("cluster", TINY_SETTINGS, indirect=True)
async def test_a_random_model_gives_transformers_answers(
    cluster: Cluster, client: openai.AsyncOpenAI, tiny_llama: TinyModel
) -> None:
    cases = [
        BeamCase(prompt_of(length), 40, width, penalty, early_stopping)
        for length, width, penalty, early_stopping in [
            (1, 2, 1.0, False),
            (15, 4, 1.0, False),
            (33, 2, 1.0, True),
            (64, 4, 2.0, False),
            (100, 4, 0.0, True),
            (31, 3, -1.0, False),
        ]
    ]
    answers = await asyncio.gather(*(server_answers(client, case) for case in cases))
    for case, answer in zip(cases, answers, strict=True):
        assert answer == transformers_answers(tiny_llama.reference, case, [1]), case


@pytest.fixture(scope="module")
def reference_model(real_model: PreparedModel) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(real_model.folder, dtype="float32").eval()


def all_cases(references: list[Reference]) -> list[BeamCase]:
    """Prompts that end and that do not, both widths, and the options."""
    ending = [reference for reference in references if reference.eos_at is not None][:3]
    others = [reference for reference in references if reference.eos_at is None][:3]
    cases = [
        BeamCase(reference.prompt_ids, 24 if reference.eos_at is None else reference.eos_at + 12, width)
        for reference in [*ending, *others]
        for width in (2, 4)
        if len(reference.prompt_ids) < 300
    ]
    cases += [
        BeamCase(ending[0].prompt_ids, 24, 4, length_penalty=2.0),
        BeamCase(ending[1].prompt_ids, 24, 4, length_penalty=0.0),
        BeamCase(ending[2].prompt_ids, 24, 4, early_stopping=True),
    ]
    return cases


def few_cases(references: list[Reference]) -> list[BeamCase]:
    """The prompt that ends first, at both widths."""
    first = min((r for r in references if r.eos_at is not None), key=lambda r: (r.eos_at, len(r.prompt_ids)))
    assert first.eos_at is not None
    return [BeamCase(first.prompt_ids, first.eos_at + 8, width) for width in (2, 4)]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[few_cases, pytest.param(all_cases, marks=pytest.mark.full)],
    ids=["few", "all"],
)
async def answers(
    request: pytest.FixtureRequest, real_model: PreparedModel, real_references: list[Reference]
) -> list[tuple[BeamCase, list[list[int]]]]:
    """The cases, served together by SmolLM2."""
    cases = request.param(real_references)
    settings = ServerSettings("frames", max_num_seqs=42, max_num_batched_tokens=512, max_model_len=1024)
    with running_cluster(real_model, settings) as cluster:
        url = f"{cluster.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=600) as client:
            found = await asyncio.gather(*(server_answers(client, case) for case in cases))
            await client.models.retrieve(SERVED_NAME)
        cluster.assert_idle()
        cluster.assert_undisturbed()
    return list(zip(cases, found, strict=True))


@pytest.mark.real_model
@pytest.mark.timeout(900)
async def test_smollm2_gives_transformers_answers(
    answers: list[tuple[BeamCase, list[list[int]]]], reference_model: transformers.PreTrainedModel
) -> None:
    num_ended = 0
    eos = int(reference_model.config.eos_token_id)
    for case, answer in answers:
        assert answer == transformers_answers(reference_model, case, [eos]), case
        num_ended += sum(output[-1] == eos for output in answer)
    assert num_ended >= 2
