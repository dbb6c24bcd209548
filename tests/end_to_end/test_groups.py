"""Two worker groups behind one gateway: prefixes draw their prompts, and a group that dies leaves nobody behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import httpx
import openai
import pytest
import pytest_asyncio

from octavo.cli.models import PreparedModel
from support.clusters import ProcessCluster, ServerSettings, running_cluster, wait_until
from support.completions import cached_tokens_of
from support.reference_tokens import Reference, tiny_reference
from support.streams import Stream, assert_tokens_follow
from support.tiny_models import TinyModel, prompt_of

NUM_TOKENS = 200
EVERY_SERVICE = tuple(f"{service}-{group}" for group in (1, 2) for service in ("worker", "kvmanager", "scheduler"))


@pytest.fixture(scope="module")
def cluster(tiny_model: PreparedModel) -> Iterator[ProcessCluster]:
    with running_cluster(tiny_model, ServerSettings(max_num_seqs=8, block_size=8, groups=2)) as running:
        assert isinstance(running, ProcessCluster)
        running.wait_until_ready()
        wait_until(lambda: set(groups_of(running).values()) == {"ready"}, 60.0, "both groups are to be ready")
        yield running


@pytest_asyncio.fixture
async def client(cluster: ProcessCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


@pytest.fixture(scope="module")
def long_references(tiny_llama: TinyModel) -> list[Reference]:
    return [tiny_reference(tiny_llama, prompt_of(length), NUM_TOKENS) for length in (3, 40, 70, 100)]


def groups_of(cluster: ProcessCluster) -> dict[str, str]:
    answer = httpx.get(f"{cluster.url}/health/ready", trust_env=False).json()
    groups: dict[str, str] = answer["groups"]
    return groups


def routed(cluster: ProcessCluster) -> dict[str, float]:
    return {pool: cluster.metric("octavo_routed_requests_total", pool=pool) for pool in ("group-1", "group-2")}


async def test_a_prefix_is_computed_once_and_then_found(cluster: ProcessCluster, client: openai.AsyncOpenAI) -> None:
    first, second = ([*prompt_of(88)[8:], *range(20, 20 + 8)], [*prompt_of(96)[16:], *range(40, 40 + 8)])
    for prompt in (first, second):
        assert await cached_tokens_of(client, prompt) == 0
    assert min(routed(cluster).values()) >= 1, "nothing was cached anywhere, so both took their turn"
    await asyncio.sleep(1.5)  # the pools are followed by now
    before = routed(cluster)
    for index in range(6):
        assert await cached_tokens_of(client, [*first, 5 + index]) == 88 // 8 * 8
    grown = {pool: count - before[pool] for pool, count in routed(cluster).items()}
    assert sorted(grown.values()) == [0, 6], "all went to the group that holds it"
    assert cluster.metric("octavo_foreseen_cached_tokens_total") >= 6 * 88


async def test_schedulers_are_told_apart_in_the_metrics(cluster: ProcessCluster) -> None:
    steps = [cluster.metric("octavo_steps_total", pool=pool) for pool in ("group-1", "group-2")]
    assert min(steps) > 0
    assert cluster.metric("octavo_steps_total") == pytest.approx(sum(steps), rel=0.1)


@pytest.mark.parametrize("service", ["scheduler-1", "worker-2"])
async def test_what_a_dead_group_had_goes_on_with_the_same_tokens(
    service: str, cluster: ProcessCluster, client: openai.AsyncOpenAI, long_references: list[Reference]
) -> None:
    streams = [Stream() for _ in long_references]
    running = [
        stream.start(client, reference.prompt_ids, NUM_TOKENS)
        for stream, reference in zip(streams, long_references, strict=True)
    ]
    await asyncio.gather(*(stream.has_tokens(10) for stream in streams))
    os.kill(cluster.pids()[service], signal.SIGKILL)
    await asyncio.gather(*running)
    for stream, reference in zip(streams, long_references, strict=True):
        assert (stream.error, stream.finish_reasons) == (None, ["length"])
        await assert_tokens_follow(stream, reference, client)
    wait_until(lambda: set(groups_of(cluster).values()) == {"ready"}, 60.0, "the group is to come back")
    for group in (1, 2):
        wait_until(lambda group=group: cluster.pool(group).num_sequences == 0, 5.0, "a sequence is left")  # type: ignore[misc]
        assert cluster.pool(group).violations == []


def replace_service(cluster: ProcessCluster, service: str) -> None:
    old = cluster.pids()[service]
    os.kill(old, signal.SIGTERM)
    wait_until(lambda: cluster.pids().get(service, old) != old, 20.0, f"{service} is not started again")
    wait_until(lambda: set(groups_of(cluster).values()) == {"ready"}, 60.0, f"not ready after {service}")


@pytest.mark.parametrize(
    "rolled",
    [("kvmanager-1", "scheduler-1"), pytest.param(2 * EVERY_SERVICE, marks=pytest.mark.full)],
    ids=["the fast ones", "all, twice"],
)
async def test_services_are_replaced_one_after_another_under_load_and_no_request_fails(
    rolled: tuple[str, ...], cluster: ProcessCluster, client: openai.AsyncOpenAI, long_references: list[Reference]
) -> None:
    """ops-a3e: all prompts begin alike, so each draws the next to a group that may just have come back empty."""
    ends = asyncio.Event()

    async def keep_asking(reference: Reference) -> list[Stream]:
        answered = []
        while not ends.is_set():
            stream = Stream()
            await stream.run(client, reference.prompt_ids, 40)
            answered.append(stream)
        return answered

    asking = [asyncio.create_task(keep_asking(reference)) for reference in long_references]
    for service in rolled:
        await asyncio.to_thread(replace_service, cluster, service)
    ends.set()
    for reference, answered in zip(long_references, await asyncio.gather(*asking), strict=True):
        assert len(answered) > len(rolled)
        for stream in answered:
            assert (stream.error, stream.finish_reasons) == (None, ["length"])
            assert stream.token_ids == reference.output_ids[:40]
    for group in (1, 2):
        assert cluster.pool(group).violations == []
