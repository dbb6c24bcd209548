"""A simulated H200 behind the whole server: real processes, HTTP, no tensor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import H200, Cluster, ProcessCluster, ServerSettings, running_cluster

# 96 requests of up to 9 blocks want more than the pool's 300: some leave for host memory and come back.
SETTINGS = ServerSettings(simulated=H200, max_num_seqs=96, num_blocks=300, num_host_blocks=600, max_model_len=2048)


@pytest.fixture(scope="module")
def simulated(simulated_model: PreparedModel) -> Iterator[Cluster]:
    with running_cluster(simulated_model, SETTINGS, in_process=False) as cluster:
        yield cluster
        cluster.assert_idle()


def client_of(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_the_worker_has_no_torch(simulated: Cluster) -> None:
    assert isinstance(simulated, ProcessCluster)
    assert "torch" not in Path(f"/proc/{simulated.pids()['worker']}/maps").read_text()


async def test_answers_are_words_of_the_length_asked_for(simulated: Cluster) -> None:
    async with client_of(simulated) as client:
        message = {"role": "user", "content": "Say hello."}
        began = time.monotonic()
        answers = [
            await client.chat.completions.create(model=H200, messages=[message], max_tokens=100, temperature=0)  # type: ignore[list-item]
            for _ in range(2)
        ]
        taken_s = time.monotonic() - began
    texts = [answer.choices[0].message.content or "" for answer in answers]
    assert texts[0] == texts[1]
    assert len(texts[0].split()) == 100
    assert [answer.usage and answer.usage.completion_tokens for answer in answers] == [100, 100]
    assert [answer.choices[0].finish_reason for answer in answers] == ["length", "length"]
    assert taken_s > 200 * 4.0e-3, "a step of one row takes at least 4 ms on an H200"


async def test_more_sequences_than_blocks_are_swapped_and_all_end(simulated: Cluster) -> None:
    """Lengths as asked, tokens by seed and position: the same request alone gets the same answer."""

    async def complete(client: openai.AsyncOpenAI, number: int) -> list[int]:
        extra = {"return_token_ids": True, "ignore_eos": True}
        answer = await client.completions.create(
            model=H200, prompt=[number] * 60, max_tokens=80, temperature=1.0, seed=number, extra_body=extra
        )
        token_ids: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
        return token_ids

    async with client_of(simulated) as client:
        together = await asyncio.gather(*(complete(client, number) for number in range(96)))
        alone = [await complete(client, number) for number in (0, 50)]
    assert {len(token_ids) for token_ids in together} == {80}
    assert alone == [together[0], together[50]]
    assert len({tuple(token_ids) for token_ids in together}) == 96
    assert simulated.metric("octavo_preemptions_total", kind="swap") > 0
    simulated.assert_undisturbed()


def test_a_schema_cannot_be_followed(simulated: Cluster) -> None:
    body = {"model": H200, "prompt": "x", "max_tokens": 5, "structured_outputs": {"regex": "[0-9]+"}}
    answer = httpx.post(f"{simulated.url}/v1/completions", json=body, timeout=20, trust_env=False)
    assert answer.status_code == 400
    assert "grammar" in answer.json()["error"]["message"]


async def test_a_worker_that_is_killed_comes_back(simulated: Cluster) -> None:
    assert isinstance(simulated, ProcessCluster)
    async with client_of(simulated) as client:
        running = asyncio.create_task(
            client.completions.create(model=H200, prompt="go on", max_tokens=300, temperature=0)
        )
        await asyncio.sleep(0.5)
        await asyncio.to_thread(simulated.kill_service, "worker")
        broken_off = (await running).choices[0].text
        again = await client.completions.create(model=H200, prompt="go on", max_tokens=300, temperature=0)
    assert broken_off == again.choices[0].text
