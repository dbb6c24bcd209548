"""A gateway under a real HTTP server, in front of a scripted scheduler."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson

from octavo.common.links import Address
from octavo.common.messages.generation import ModelInfo, Submit
from octavo.common.runtime import Stop
from octavo.gateway.app import create_app
from octavo.gateway.config import GatewayConfig
from octavo.gateway.group_setup import registry_of, worker_groups
from octavo.gateway.http_server import listen_http, serve_http
from octavo.gateway.worker_groups import WorkerGroups
from support.scripted_scheduler import Answer, ScriptedScheduler
from support.small_tokenizer import CHAT_TEMPLATE, EOS, byte_level_tokenizer, id_of, model_tokenizer
from support.waiting import eventually

MAX_MODEL_LEN = 128
TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 8  # embeddings are often padded
EOS_ID = id_of(TOKENIZER, EOS)


def ids_of(text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def says(*texts: str, **options: Any) -> Callable[[Submit], Answer]:
    """A script by which every request gets these texts as its choices."""
    answer = Answer([ids_of(text) for text in texts], **options)
    return lambda submit: answer


@dataclass
class RunningGateway:
    """What a test needs of it."""

    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    schedulers: dict[str, ScriptedScheduler]
    """By pool."""
    client: WorkerGroups
    stop: Stop
    serving: asyncio.Task[None]
    port: int

    @property
    def scheduler(self) -> ScriptedScheduler:
        """The only one."""
        [scheduler] = self.schedulers.values()
        return scheduler

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def complete(self, **body: Any) -> dict[str, Any]:
        """The body of a completion that must succeed."""
        response = await self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a stream but `[DONE]`, which must come last unless an error ended it."""
        response = await self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        if events[-1] != "[DONE]":
            assert "error" in orjson.loads(events[-1])
            events.append("[DONE]")
        return [orjson.loads(event) for event in events[:-1]]


@contextlib.asynccontextmanager
async def running_gateway(
    script: Callable[[Submit], Answer],
    step_s: float = 0.0,
    chat_template: str = CHAT_TEMPLATE,
    max_model_len: int = MAX_MODEL_LEN,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """Ready when entered; stopped in order when left. One scheduler, or with `registry` as many as that names."""
    model = ModelInfo("m", max_model_len, VOCAB_SIZE, (EOS_ID,), max_num_seqs=32, block_size=16)
    schedulers = defaultdict[str, ScriptedScheduler](lambda: ScriptedScheduler(model, script, step_s))
    only = {} if "registry" in settings else {"scheduler": Address.parse("grpc://unused:1")}
    config = GatewayConfig(**{"drain_grace_s": 0.0, "model": Path(), "port": 0, **only, **settings})
    client = worker_groups(config, registry_of(config), lambda member: schedulers[member.pool_id].connect())
    listening, stop = listen_http(config), Stop()
    port = listening.getsockname()[1]
    app = create_app(config, client, model_tokenizer(chat_template))
    serving = asyncio.create_task(serve_http(app, config, client, listening, stop))
    base_url = f"http{'s' if config.tls_cert else ''}://127.0.0.1:{port}"
    async with (
        httpx.AsyncClient(base_url=base_url, timeout=20, verify=False) as http,
        openai.DefaultAsyncHttpxClient(verify=False) as http_of_official,
        openai.AsyncOpenAI(
            base_url=f"{base_url}/v1", api_key="none", max_retries=0, http_client=http_of_official
        ) as official,
    ):
        await eventually(lambda: not client.why_not_ready, within_s=20.0)
        try:
            yield RunningGateway(http, official, schedulers, client, stop, serving, port)
        finally:
            if not stop.is_requested:
                stop.request()
            await serving
