"""KV manager or scheduler end under load: streams go on with equal tokens, and cached prefixes live on."""

from __future__ import annotations

import asyncio
import signal

import openai
import pytest
from pytest import MonkeyPatch

from octavo.cli.models import PreparedModel
from support.clusters import ProcessCluster, ServerSettings, running_cluster
from support.completions import greedy
from support.reference_tokens import assert_follows, tiny_reference
from support.streams import Stream
from support.tiny_models import TinyModel, prompt_of

NUM_TOKENS = 300


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_death_of_the_kv_manager_costs_no_computed_token(
    transport: str, tiny_model: PreparedModel, tiny_llama: TinyModel
) -> None:
    settings = ServerSettings(transport, max_num_seqs=8, block_size=8)  # type: ignore[arg-type]
    with running_cluster(tiny_model, settings) as cluster:
        assert isinstance(cluster, ProcessCluster)
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            cached = tiny_reference(tiny_llama, prompt_of(200), 40)
            await assert_follows(cached, greedy(client), num_tokens=8)
            references = [tiny_reference(tiny_llama, prompt_of(length), NUM_TOKENS) for length in (3, 40, 100)]
            streams = [Stream() for _ in references]
            running = [
                stream.start(client, reference.prompt_ids, NUM_TOKENS)
                for stream, reference in zip(streams, references, strict=True)
            ]
            for num_tokens in (20, 150):
                await asyncio.gather(*(stream.has_tokens(num_tokens) for stream in streams))
                await asyncio.to_thread(cluster.kill_service, "kvmanager")
            await asyncio.gather(*running)
            for stream, reference in zip(streams, references, strict=True):
                assert (stream.error, stream.finish_reasons) == (None, ["length"])
                assert stream.token_ids == reference.output_ids
            cluster.wait_until_ready()
            hits = cluster.metric("octavo_scheduler_cached_prompt_tokens_total")
            await assert_follows(cached, greedy(client), num_tokens=8)
            assert cluster.metric("octavo_scheduler_cached_prompt_tokens_total") - hits >= 192
            cluster.assert_undisturbed()
            assert cluster.metric("octavo_preemptions_total") == 0
            assert cluster.metric("octavo_pool_declarations_total") >= 1
        cluster.assert_idle()


async def test_cached_prefixes_outlive_the_scheduler(
    tiny_model: PreparedModel, tiny_llama: TinyModel, monkeypatch: MonkeyPatch
) -> None:
    """It is killed, the next one is told to end. All full blocks of earlier prompts and of the streams are found."""
    monkeypatch.setenv("OCTAVO_SCHEDULER_DRAIN_GRACE_S", "0.05")
    with running_cluster(tiny_model, ServerSettings("frames", max_num_seqs=8, block_size=8)) as cluster:
        assert isinstance(cluster, ProcessCluster)
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            cached = tiny_reference(tiny_llama, prompt_of(200), 40)
            await assert_follows(cached, greedy(client), num_tokens=8)
            references = [tiny_reference(tiny_llama, prompt_of(length), NUM_TOKENS) for length in (3, 40, 100)]
            streams = [Stream() for _ in references]
            running = [
                stream.start(client, reference.prompt_ids, NUM_TOKENS)
                for stream, reference in zip(streams, references, strict=True)
            ]
            for num_tokens, signal_no in ((20, signal.SIGKILL), (50, signal.SIGTERM)):
                await asyncio.gather(*(stream.has_tokens(num_tokens) for stream in streams))
                await asyncio.to_thread(cluster.end_service, "scheduler", signal_no)
            await asyncio.gather(*running)
            for stream, reference in zip(streams, references, strict=True):
                assert (stream.error, stream.finish_reasons) == (None, ["length"])
                assert stream.token_ids == reference.output_ids
            cluster.wait_until_ready()
            assert cluster.metric("octavo_scheduler_cached_prompt_tokens_total") == 3 + 40 + 100
            await assert_follows(cached, greedy(client), num_tokens=8)
            assert cluster.metric("octavo_scheduler_cached_prompt_tokens_total") == 3 + 40 + 100 + 192
            cluster.assert_undisturbed()
        cluster.assert_idle()
