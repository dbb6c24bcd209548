"""Links that are slow, cut, or half open, between real processes: answers stay right, and every wait ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from octavo.cli.models import PreparedModel
from support.clusters import free_port, wait_until
from support.completions import SERVED_NAME
from support.faulty_link import FaultyLink, faulty_link
from support.reference_tokens import Reference, tiny_reference
from support.single_services import SingleServices
from support.streams import Stream
from support.tiny_models import TinyModel, prompt_of

NUM_TOKENS = 250
KV_TIMEOUT_S, STEP_TIMEOUT_S, TOKEN_TIMEOUT_S = 1.5, 3.0, 6.0
SCHEDULER = {"max_num_seqs": 8, "kvmanager_timeout_s": KV_TIMEOUT_S, "step_timeout_s": STEP_TIMEOUT_S}


@dataclass
class Stack:
    """All services, with a link that can be broken in front of each that has clients."""

    services: SingleServices
    url: str
    to_scheduler: FaultyLink
    to_kvmanager: FaultyLink
    to_worker: FaultyLink

    @property
    def links(self) -> list[FaultyLink]:
        return [self.to_scheduler, self.to_kvmanager, self.to_worker]

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", trust_env=False, timeout=2.0).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def running(tiny_model: PreparedModel) -> Iterator[tuple[SingleServices, int]]:
    """Processes that reach one another by sockets named `NAME.link`, which each test opens."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="octavo-links-") as folder, SingleServices(Path(folder)) as services:
        services.start("kvmanager", check_ledger=True)
        services.start("worker", model=tiny_model.folder, model_name=SERVED_NAME, block_size=8, max_num_seqs=8)
        start_scheduler(services, "scheduler", ".link")
        services.start(
            "gateway",
            scheduler=f"frames://{folder}/scheduler.link",
            model=tiny_model.folder,
            port=port,
            token_timeout_s=TOKEN_TIMEOUT_S,
            recovery_timeout_s=20,
        )
        yield services, port


def start_scheduler(services: SingleServices, name: str, suffix: str) -> None:
    addresses = {peer: f"frames://{services.folder}/{peer}{suffix}" for peer in ("kvmanager", "worker")}
    services.start("scheduler", name, **addresses, **SCHEDULER)


@pytest_asyncio.fixture
async def stack(running: tuple[SingleServices, int]) -> AsyncIterator[Stack]:
    services, port = running
    async with contextlib.AsyncExitStack() as links:
        opened = []
        for name in ("scheduler", "kvmanager", "worker"):
            at = services.folder / f"{name}.link"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(at)
            opened.append(await links.enter_async_context(faulty_link(at, services.socket(name))))
        found = Stack(services, f"http://127.0.0.1:{port}", *opened)
        await asyncio.to_thread(wait_until, found.is_ready, 120.0, lambda: services.log("scheduler"))
        yield found


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def references(tiny_llama: TinyModel) -> list[Reference]:
    return [tiny_reference(tiny_llama, prompt_of(length), NUM_TOKENS) for length in (3, 40)]


def start_all(client: openai.AsyncOpenAI, references: list[Reference]) -> tuple[list[Stream], list[asyncio.Task[None]]]:
    streams = [Stream() for _ in references]
    pairs = zip(streams, references, strict=True)
    return streams, [stream.start(client, reference.prompt_ids, NUM_TOKENS) for stream, reference in pairs]


def assert_right(streams: list[Stream], references: list[Reference]) -> None:
    for stream, reference in zip(streams, references, strict=True):
        assert (stream.error, stream.finish_reasons) == (None, ["length"])
        assert stream.token_ids == reference.output_ids


async def test_slow_and_uneven_links_cost_time_only(
    stack: Stack, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    for link in stack.links:
        link.delay_s = (0.0, 0.02)
    streams, running = start_all(client, references)
    await asyncio.gather(*running)
    assert_right(streams, references)


async def test_links_that_are_cut_again_and_again_are_a_pause(
    stack: Stack, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    streams, running = start_all(client, references)
    for num_tokens in (20, 100):
        for link in stack.links:
            await asyncio.gather(*(stream.has_tokens(num_tokens) for stream in streams))
            link.cut()
            num_tokens += 20
    await asyncio.gather(*running)
    assert_right(streams, references)
    assert [link.num_connections for link in stack.links] == [3, 3, 3]
    assert stack.services.log("worker").count("model loaded") == 1


@pytest.mark.parametrize("peer", ["kvmanager", pytest.param("worker", marks=pytest.mark.full)])
async def test_half_open_link_is_given_up_and_opened_anew(
    peer: str, stack: Stack, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    link: FaultyLink = getattr(stack, f"to_{peer}")
    streams, running = start_all(client, references)
    await asyncio.gather(*(stream.has_tokens(20) for stream in streams))
    link.stall()
    await asyncio.to_thread(
        wait_until,
        lambda: f"{KV_TIMEOUT_S if peer == 'kvmanager' else STEP_TIMEOUT_S} s" in scheduler_news(stack),
        10,
        "",
    )
    link.cut()
    link.heal()
    await asyncio.gather(*running)
    assert_right(streams, references)


def scheduler_news(stack: Stack) -> str:
    """What its log says of links that it gave up."""
    lines = stack.services.log("scheduler").splitlines()
    return "\n".join(line for line in lines if "has not" in line)


@pytest.mark.full
async def test_wait_for_a_half_open_scheduler_ends(
    stack: Stack, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    streams, running = start_all(client, references)
    await asyncio.gather(*(stream.has_tokens(20) for stream in streams))
    stack.to_scheduler.stall()
    stalled_at = time.monotonic()
    await asyncio.wait_for(asyncio.gather(*running), TOKEN_TIMEOUT_S + 5)
    assert time.monotonic() - stalled_at > TOKEN_TIMEOUT_S - 1
    for stream in streams:
        assert stream.error is not None and stream.error.code == "service_unavailable"
    stack.to_scheduler.heal()
    streams, running = start_all(client, references)
    await asyncio.gather(*running)
    assert_right(streams, references)


async def test_scheduler_that_was_cut_off_is_fenced_and_its_requests_go_on_at_the_next(
    stack: Stack, client: openai.AsyncOpenAI, references: list[Reference]
) -> None:
    streams, running = start_all(client, references)
    await asyncio.gather(*(stream.has_tokens(20) for stream in streams))
    stack.to_scheduler.is_away = True
    stack.to_scheduler.cut()
    stack.to_kvmanager.stall()
    stack.to_worker.stall()
    await asyncio.to_thread(start_scheduler, stack.services, "successor", ".sock")
    await asyncio.to_thread(stack.services.wait_until_ready, "successor")
    stack.to_scheduler.target = stack.services.socket("successor")
    stack.to_scheduler.is_away = False
    stack.to_kvmanager.heal()
    stack.to_worker.heal()
    await asyncio.gather(*running)
    assert_right(streams, references)
    await asyncio.to_thread(wait_until, lambda: "epoch" in stack.services.why_not_ready("scheduler"), 10, "not fenced")
    assert stack.services.why_not_ready("successor") == ""
