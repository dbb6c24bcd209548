"""Ctrl-C: under load too, all is gone within 5 s, in order."""

from __future__ import annotations

import asyncio
import time

import openai
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import STOPPED_WITHIN_S, ProcessCluster, ServerSettings, Transport, running_cluster
from support.streams import Stream


@pytest.mark.parametrize("transport", ["frames", "local"])
async def test_interrupt_under_load_ends_everything(tiny_model: PreparedModel, transport: Transport) -> None:
    settings = ServerSettings(transport, max_num_seqs=8)
    with running_cluster(tiny_model, settings, in_process=False) as cluster:
        assert isinstance(cluster, ProcessCluster)
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            streams = [Stream() for _ in range(12)]
            running = [stream.start(client, [5, 6, 7], 1000) for stream in streams]
            async with asyncio.timeout(20):
                while sum(len(stream.token_ids) >= 5 for stream in streams) < 8:  # noqa: ASYNC110 (many streams at once)
                    await asyncio.sleep(0.005)
            began = time.monotonic()
            await asyncio.to_thread(cluster.stop)
            assert time.monotonic() - began < STOPPED_WITHIN_S
            await asyncio.gather(*running)
        for stream in streams:
            assert stream.finish_reasons == []
            assert isinstance(stream.error, openai.APIError)
