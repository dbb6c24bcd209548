"""A service is killed, or hangs, while requests run: clients see a pause, and whoever asks is told what is wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from octavo.cli.models import PreparedModel
from support.clusters import Cluster, ProcessCluster, ServerSettings, running_cluster
from support.completions import SERVED_NAME, greedy, output_ids
from support.reference_tokens import Reference, assert_follows, tiny_reference
from support.streams import Stream, assert_tokens_follow
from support.tiny_models import TinyModel, prompt_of

NUM_TOKENS = 300
LOSSES = ("octavo_pool_losses_total", "octavo_worker_resumes_total", "octavo_kvmanager_resumes_total")


@pytest.fixture(scope="module")
def cluster(tiny_model: PreparedModel) -> Iterator[Cluster]:
    with running_cluster(tiny_model, ServerSettings("frames", max_num_seqs=8, block_size=8)) as running:
        yield running
        running.assert_idle()


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


@pytest.fixture(scope="module")
def long_references(tiny_llama: TinyModel) -> list[Reference]:
    return [tiny_reference(tiny_llama, prompt_of(length), NUM_TOKENS) for length in (3, 40, 100)]


@pytest.mark.parametrize("service", ["worker", "kvmanager", "scheduler"])
async def test_streams_go_on_with_the_same_tokens_after_the_death_of_a(
    service: str, cluster: Cluster, client: openai.AsyncOpenAI, long_references: list[Reference]
) -> None:
    assert isinstance(cluster, ProcessCluster)
    streams = [Stream() for _ in long_references]
    running = [
        stream.start(client, reference.prompt_ids, NUM_TOKENS)
        for stream, reference in zip(streams, long_references, strict=True)
    ]
    await asyncio.gather(*(stream.has_tokens(20) for stream in streams))
    await asyncio.to_thread(cluster.kill_service, service)
    await asyncio.gather(*running)
    for stream, reference in zip(streams, long_references, strict=True):
        assert (stream.error, stream.finish_reasons) == (None, ["length"])
        await assert_tokens_follow(stream, reference, client)
    cluster.wait_until_ready()
    cluster.assert_idle()


async def test_worker_keeps_its_model_and_clients_their_requests_over_the_death_of_the_scheduler(
    cluster: Cluster, client: openai.AsyncOpenAI, long_references: list[Reference]
) -> None:
    """All kinds: sampled choices, a beam search, a request that comes while no scheduler is there.

    What was kept for branches is lost, and whoever asks for it is told why.
    """
    assert isinstance(cluster, ProcessCluster)
    sampled: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 7}
    beams: dict[str, Any] = {"n": 2, "best_of": 3, "use_beam_search": True}
    alone = [await output_ids(client, [5, 6, 7], 150, **options) for options in (sampled, beams)]
    kept = await client.completions.create(model=SERVED_NAME, prompt=[5, 6, 7], max_tokens=5, extra_body={"keep": 600})
    worker, num_loads = cluster.pids()["worker"], cluster.log().count("model loaded")
    assert num_loads > 0
    stream = Stream()
    running = stream.start(client, long_references[0].prompt_ids, NUM_TOKENS)
    both = [asyncio.create_task(output_ids(client, [5, 6, 7], 150, **options)) for options in (sampled, beams)]
    await stream.has_tokens(20)
    os.kill(cluster.pids()["scheduler"], signal.SIGKILL)
    late = await output_ids(client, long_references[1].prompt_ids, 40, temperature=0.0)
    assert await asyncio.gather(*both) == alone
    await running
    await assert_tokens_follow(stream, long_references[0], client)
    assert late == [long_references[1].output_ids[:40]]
    cluster.wait_until_ready()
    with pytest.raises(openai.NotFoundError, match="the scheduler that served it has been lost since") as refused:
        await client.completions.create(model=SERVED_NAME, prompt=[8], extra_body={"branch": {"id": kept.id}})
    assert refused.value.code == "response_not_found"
    assert cluster.pids()["worker"] == worker
    assert cluster.log().count("model loaded") == num_loads, "the worker loads its model again for a new scheduler"
    cluster.assert_idle()


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("worker", "worker"),
        ("scheduler", "scheduler"),
        pytest.param("kvmanager", "KV manager", marks=pytest.mark.full),
    ],
)
async def test_a_service_that_hangs_is_named_within_5_s_and_all_goes_on_once_it_does(
    service: str, name: str, cluster: Cluster, client: openai.AsyncOpenAI, long_references: list[Reference]
) -> None:
    """ops-374, of a process; test_readiness.py has a step that does not end."""
    assert isinstance(cluster, ProcessCluster)
    before = [cluster.metric(counter) for counter in LOSSES]
    streams = [Stream() for _ in long_references]
    running = [
        stream.start(client, reference.prompt_ids, NUM_TOKENS)
        for stream, reference in zip(streams, long_references, strict=True)
    ]
    await asyncio.gather(*(stream.has_tokens(20) for stream in streams))
    hung = cluster.pids()[service]
    os.kill(hung, signal.SIGSTOP)
    try:
        reason = f"the {name} gives no sign of life"
        async with asyncio.timeout(5.0), httpx.AsyncClient(base_url=cluster.url, trust_env=False) as http:
            while reason not in (answer := await http.get("/health/ready")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert answer.status_code == 503
    finally:
        os.kill(hung, signal.SIGCONT)
    await asyncio.gather(*running)
    for stream, reference in zip(streams, long_references, strict=True):
        assert (stream.error, stream.finish_reasons) == (None, ["length"])
        assert stream.token_ids == reference.output_ids
    cluster.wait_until_ready()
    assert [cluster.metric(counter) for counter in LOSSES] == before, "a hang of some seconds costs no link"
    cluster.assert_idle()


async def test_death_of_the_gateway_ends_its_requests(
    cluster: Cluster, client: openai.AsyncOpenAI, long_references: list[Reference]
) -> None:
    assert isinstance(cluster, ProcessCluster)
    stream = Stream()
    running = asyncio.gather(stream.start(client, [5, 6, 7], NUM_TOKENS), return_exceptions=True)
    await stream.has_tokens(20)
    await asyncio.to_thread(cluster.kill_service, "gateway")
    await running
    assert stream.finish_reasons == []
    cluster.wait_until_ready()
    cluster.assert_idle()
    await assert_follows(long_references[1], greedy(client), num_tokens=40)
