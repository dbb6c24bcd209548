"""The gateway's end of the scheduler stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from octavo.common.errors import LinkClosedError, NotReadyError, QueueFullError
from octavo.common.messages.generation import Abort, ChoiceFinished, ModelInfo, SamplingParams, Submit
from octavo.gateway.scheduler_client import Generation, Prompt, SchedulerClient
from support.running_gateway import eventually
from support.scripted_scheduler import Answer, ScriptedScheduler

MODEL = ModelInfo("m", 64, 100, (99,), max_num_seqs=4, block_size=16)


@contextlib.asynccontextmanager
async def connected(
    script: Callable[[Submit], Answer], **options: float
) -> AsyncIterator[tuple[SchedulerClient, ScriptedScheduler]]:
    scheduler = ScriptedScheduler(MODEL, script)
    client = SchedulerClient(scheduler.connect, **options)  # type: ignore[arg-type]
    running = asyncio.create_task(client.run())
    await eventually(lambda: not client.why_not_ready)
    yield client, scheduler
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def prompt(max_tokens: int = 3, n: int = 1) -> Prompt:
    return Prompt((1, 2), SamplingParams(max_tokens=max_tokens, n=n))


def always(*choices: list[int], **options: int | bool) -> Callable[[Submit], Answer]:
    return lambda submit: Answer(list(choices), **options)  # type: ignore[arg-type]


async def tokens_of(generation: Generation) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for events in generation:
        for choice, event in events:
            if isinstance(event, int):
                tokens.setdefault(choice, []).append(event)
    return tokens


async def test_a_scheduler_that_was_replaced_is_refused() -> None:
    async with connected(always([5])) as (client, scheduler):
        scheduler.status = replace(scheduler.status, epoch=7)
        scheduler.tell_status(True)
        await eventually(lambda: client.epoch == 7)
        scheduler.status = replace(scheduler.status, epoch=6)
        scheduler.drop_link()
        await asyncio.sleep(0.2)
        assert client.why_not_ready
        scheduler.status = replace(scheduler.status, epoch=8)
        await eventually(lambda: not client.why_not_ready, 2.0)
        with client.submit("r", [prompt(max_tokens=1)]) as generation:
            assert await tokens_of(generation) == {0: [5]}


async def test_each_choice_of_each_prompt_has_its_number() -> None:
    def script(submit: Submit) -> Answer:
        first = submit.prompt_token_ids[0]
        return Answer([[first, first + 1, first + 2], [first + 10, first + 11, first + 12]])

    prompts = [Prompt((first,), SamplingParams(max_tokens=3, n=2)) for first in (20, 40)]
    async with connected(script) as (client, scheduler):
        with client.submit("r", prompts) as generation:
            tokens = await tokens_of(generation)
        assert tokens == {0: [20, 21, 22], 1: [30, 31, 32], 2: [40, 41, 42], 3: [50, 51, 52]}
        assert [submit.request_id for submit in scheduler.submits] == ["r-0", "r-1"]
        assert scheduler.aborts == []


async def test_tokens_of_one_step_arrive_together() -> None:
    async with connected(always([5, 6, 7, 8], tokens_per_step=4)) as (client, _):
        with client.submit("r", [prompt(4)]) as generation:
            events = await anext(generation)
    assert [event for _, event in events if isinstance(event, int)] == [5, 6, 7, 8]
    assert isinstance(events[-1][1], ChoiceFinished)


async def test_leaving_early_aborts_once() -> None:
    async with connected(always([1] * 50, pauses_after=2)) as (client, scheduler):
        with client.submit("r", [prompt(50), prompt(50)]) as generation:
            await anext(generation)
        generation.__exit__()
        await eventually(lambda: scheduler.num_running == 0)
        assert scheduler.aborts == [Abort(1), Abort(2)]
        assert client.num_open_requests == 0


async def test_choice_given_up_is_aborted_once_and_the_others_go_on() -> None:
    async with connected(always([1] * 4, [2] * 4)) as (client, scheduler):
        with client.submit("r", [prompt(4, n=2)]) as generation:
            await anext(generation)
            generation.abort_choice(0, 1)
            generation.abort_choice(0, 1)
            tokens = await tokens_of(generation)
        assert len(tokens[1]) >= 2
        assert scheduler.aborts == [Abort(1, 0)]


async def test_giving_up_the_last_choice_ends_the_request() -> None:
    async with connected(always([1] * 50, pauses_after=1)) as (client, scheduler):
        with client.submit("r", [prompt(50)]) as generation:
            await anext(generation)
            generation.abort_choice(0, 1)
            assert await tokens_of(generation) == {}
        await eventually(lambda: scheduler.num_running == 0)
        assert scheduler.aborts == [Abort(1, 0)]


async def test_lost_link_ends_its_requests_and_is_opened_anew() -> None:
    async with connected(always([1] * 50, pauses_after=1)) as (client, scheduler):
        with client.submit("r", [prompt(50)]) as generation:
            await anext(generation)
            scheduler.drop_link()
            with pytest.raises(LinkClosedError):
                await anext(generation)
        scheduler.script = always([7, 7, 7])
        await eventually(lambda: not client.why_not_ready)
        with client.submit("r", [prompt()]) as generation:
            assert await tokens_of(generation) == {0: [7, 7, 7]}
        assert scheduler.aborts == []


async def test_scheduler_that_is_away_is_named_and_found_later() -> None:
    async with connected(always([1])) as (client, scheduler):
        scheduler.is_away = True
        scheduler.drop_link()
        await eventually(lambda: "cannot be reached" in client.why_not_ready)
        with pytest.raises(NotReadyError):
            client.submit("r", [prompt()])
        scheduler.is_away = False
        await eventually(lambda: not client.why_not_ready, within_s=5)


async def test_request_that_waits_too_long_for_room_fails_and_is_aborted() -> None:
    async with connected(always([1], never_starts=True), queue_timeout_s=0.1) as (client, scheduler):
        with client.submit("r", [prompt()]) as generation, pytest.raises(NotReadyError, match=r"within 0\.1 s"):
            await tokens_of(generation)
        await eventually(lambda: scheduler.aborts == [Abort(1)])


async def test_request_that_stops_to_bring_tokens_fails_and_is_aborted() -> None:
    async with connected(always([1] * 9, pauses_after=3), token_timeout_s=0.1) as (client, scheduler):
        with client.submit("r", [prompt(9)]) as generation, pytest.raises(NotReadyError, match="no token"):
            await tokens_of(generation)
        await eventually(lambda: scheduler.aborts == [Abort(1)])


async def test_number_of_open_requests_is_bounded() -> None:
    async with connected(always([1], never_starts=True), max_open_requests=2) as (client, scheduler):
        with client.submit("r", [prompt(), prompt()]), pytest.raises(QueueFullError):
            client.submit("s", [prompt()])
        client.submit("t", [prompt()]).__exit__()
        await eventually(lambda: scheduler.aborts == [Abort(1), Abort(2), Abort(3)])


async def test_refused_prompt_ends_the_whole_request() -> None:
    def script(submit: Submit) -> Answer:
        is_second = submit.prompt_token_ids == (2,)
        return Answer([[1] * 50], fails_after=0 if is_second else None, failure=("QUEUE_FULL", "full"))

    prompts = [Prompt((first,), SamplingParams(max_tokens=50)) for first in (1, 2, 3)]
    async with connected(script) as (client, scheduler):
        with client.submit("r", prompts) as generation, pytest.raises(QueueFullError, match="full"):
            await tokens_of(generation)
        await eventually(lambda: scheduler.num_running == 0)
        assert scheduler.aborts == [Abort(1), Abort(3)]


async def test_draining_waits_for_what_runs_and_then_cuts_it() -> None:
    async with connected(always([1] * 50, pauses_after=1)) as (client, _):
        client.refuse_new_work("the server is shutting down")
        assert client.why_not_ready == "the server is shutting down"
    async with connected(always([1] * 50, pauses_after=1)) as (client, scheduler):
        with client.submit("r", [prompt(50)]) as generation:
            await anext(generation)
            await client.drain(0.05)
            with pytest.raises(NotReadyError, match="shutting down"):
                await anext(generation)
        await client.drain(5)
        await eventually(lambda: scheduler.aborts == [Abort(1)])
