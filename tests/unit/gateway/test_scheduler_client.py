"""The gateway's end of the scheduler stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from octavo.common.errors import LinkClosedError, NotReadyError, QueueFullError
from octavo.common.messages.generation import (
    Abort,
    BranchPoint,
    ChoiceFinished,
    ModelInfo,
    ResumedChoice,
    SamplingParams,
    SchedulerStatus,
    Submit,
)
from octavo.gateway.generation import Generation
from octavo.gateway.request_part import MAX_LOSSES_IN_A_ROW, Prompt
from octavo.gateway.scheduler_client import SchedulerClient
from support.scripted_scheduler import Answer, ScriptedScheduler
from support.waiting import eventually

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


def always(*choices: list[int], **options: Any) -> Callable[[Submit], Answer]:
    return lambda submit: Answer(list(choices), **options)


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
        await eventually(lambda: not client.why_not_ready)
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


async def test_request_goes_on_at_the_next_scheduler_with_the_tokens_it_has() -> None:
    async with connected(always([1, 2, 3, 4], pauses_after=2)) as (client, scheduler):
        with client.submit("r", [prompt(4)], b"salt") as generation:
            await eventually(lambda: len(generation.parts[0].outputs[0]) == 2)
            scheduler.script = always([3, 4])
            scheduler.drop_link()
            assert await tokens_of(generation) == {0: [1, 2, 3, 4]}
            assert generation.num_prompt_tokens == 2
        first, again = scheduler.submits
        assert (first.resumed, again.resumed) == ((), (ResumedChoice(0, (1, 2)),))
        assert (again.params, again.prompt_token_ids, again.cache_salt, again.request_id) == (
            first.params,
            first.prompt_token_ids,
            b"salt",
            "r",
        )
        assert scheduler.aborts == []
        assert client.num_open_requests == 0


async def test_request_without_tokens_begins_anew_at_the_next_scheduler() -> None:
    async with connected(always([1], never_starts=True)) as (client, scheduler):
        with client.submit("r", [prompt(2, n=2)]) as generation:
            await eventually(lambda: scheduler.num_running == 1)
            scheduler.script = always([5, 6])
            scheduler.drop_link()
            assert await tokens_of(generation) == {0: [5, 6], 1: [5, 6]}
        assert [submit.resumed for submit in scheduler.submits] == [(), ()]


async def test_choices_that_have_ended_are_not_asked_for_again() -> None:
    async with connected(always([99], [1] * 9, [2] * 9, pauses_after=2)) as (client, scheduler):
        with client.submit("r", [prompt(5, n=3)]) as generation:
            await eventually(lambda: len(generation.parts[0].outputs[1]) == 2)
            generation.abort_choice(2, 1)
            scheduler.drop_link()
            await eventually(lambda: len(scheduler.submits) == 2)
        assert scheduler.submits[1].resumed == (ResumedChoice(1, (1, 1)),)


async def test_parts_get_new_numbers_and_leave_those_of_others_alone() -> None:
    def script(submit: Submit) -> Answer:
        return Answer([[7] * 50], pauses_after=50 if submit.prompt_token_ids == (1,) else 1)

    prompts = [Prompt((first,), SamplingParams(max_tokens=tokens)) for first, tokens in ((1, 1), (2, 9))]
    async with connected(script) as (client, scheduler):
        with client.submit("r", prompts) as generation:
            await eventually(lambda: client.num_open_requests == 1)
            scheduler.drop_link()
            await eventually(lambda: len(scheduler.submits) == 3)
            other = client.submit("s", [prompt(9)])
            assert [part.request_no for part in (*generation.parts, *other.parts)] == [1, 2]
        await eventually(lambda: scheduler.aborts == [Abort(1)])
        assert client.num_open_requests == 1
        other.__exit__()


async def test_branch_is_submitted_again_with_the_tokens_that_it_shares() -> None:
    branch = Prompt((8,), SamplingParams(max_tokens=9), BranchPoint("parent", 0, 2))
    async with connected(always([1] * 9, pauses_after=1, shared_token_ids=(3, 4))) as (client, scheduler):
        with client.submit("r", [branch]) as generation:
            await anext(generation)
            scheduler.drop_link()
            await eventually(lambda: len(scheduler.submits) == 2)
            assert generation.num_prompt_tokens == 3
        assert (scheduler.submits[1].prompt_token_ids, scheduler.submits[1].branch) == ((3, 4, 8), None)


async def test_request_that_ends_each_scheduler_is_given_up() -> None:
    async with connected(always([1] * 50, pauses_after=1)) as (client, scheduler):
        with client.submit("r", [prompt(50)]) as generation:
            await anext(generation)
            scheduler.script = always([1], never_starts=True)
            for losses in range(1, MAX_LOSSES_IN_A_ROW + 1):
                await eventually(lambda losses=losses: len(scheduler.submits) == losses)  # type: ignore[misc]
                scheduler.drop_link()
            with pytest.raises(LinkClosedError):
                await anext(generation)
        await eventually(lambda: not client.why_not_ready)
        assert len(scheduler.submits) == MAX_LOSSES_IN_A_ROW


async def test_scheduler_that_is_away_is_named_and_new_requests_wait_for_it() -> None:
    async with connected(always([5])) as (client, scheduler):
        scheduler.is_away = True
        scheduler.drop_link()
        await eventually(lambda: "cannot be reached" in client.why_not_ready)
        with client.submit("r", [prompt(1)]) as generation:
            scheduler.is_away = False
            assert await tokens_of(generation) == {0: [5]}
        assert client.why_not_ready == ""


async def test_requests_fail_when_no_scheduler_comes_back_in_time() -> None:
    async with connected(always([1] * 50, pauses_after=1), recovery_timeout_s=0.3) as (client, scheduler):
        with client.submit("r", [prompt(50)]) as generation:
            await anext(generation)
            scheduler.is_away = True
            scheduler.drop_link()
            with pytest.raises(NotReadyError, match=r"within 0\.3 s: the scheduler cannot be reached"):
                await tokens_of(generation)
        with pytest.raises(NotReadyError, match="cannot be reached"):
            client.submit("r", [prompt()])


async def test_scheduler_that_stops_ends_what_it_has_and_gets_nothing_new() -> None:
    async with connected(always([1, 2, 3]), recovery_timeout_s=5) as (client, scheduler):
        scheduler.step_s = 0.02
        with client.submit("old", [prompt(3)]) as old:
            await anext(old)
            scheduler.tell_status(False, "shutting down", is_draining=True)
            await eventually(lambda: client.why_not_ready == "shutting down")
            with client.submit("new", [prompt(1)]) as new:
                assert [*(await tokens_of(old)).values()] == [[2, 3]]
                assert [submit.request_id for submit in scheduler.submits] == ["old"]
                scheduler.status = scheduler.ready_status
                scheduler.drop_link()
                assert await tokens_of(new) == {0: [1]}


async def test_another_model_does_not_go_on_with_the_tokens_of_the_first() -> None:
    async with connected(always([1] * 50, pauses_after=1)) as (client, scheduler):
        with client.submit("r", [prompt(50)]) as generation:
            await anext(generation)
            scheduler.status = SchedulerStatus(True, "", replace(MODEL, vocab_size=50))
            scheduler.drop_link()
            with pytest.raises(NotReadyError, match="replaced"):
                await anext(generation)
        assert len(scheduler.submits) == 1


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
