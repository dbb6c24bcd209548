"""A writer takes events in place of the task that iterates, and leaves to the task what it cannot do at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from octavo.common.errors import OverloadedLinkError
from octavo.common.messages.generation import ChoiceFinished, FinishReason, SamplingParams
from octavo.gateway.event_writer import rest_of
from octavo.gateway.generation import Events, Generation
from octavo.gateway.request_part import Part, Prompt


class Client:
    """Gives up what it is told to."""

    def abort_choice(self, part: Part, choice_index: int, num_tokens: int) -> None:
        part.open_choices.discard(choice_index)

    def abandon(self, generation: Generation) -> None:
        for part in generation.parts:
            part.open_choices.clear()


class Stream:
    """A generation of one choice whose events a task reads into `read`, and a writer into `written`."""

    def __init__(self) -> None:
        self.generation = Generation(Client(), 1)
        self.part = Part(self.generation, 1, "request", 0, Prompt((5,), SamplingParams(max_tokens=100)), b"")
        self.generation.add(self.part)
        self.read: list[Events] = []
        self.written: list[Events] = []
        self.unfinished: Awaitable[None] | None = None
        self.generation.write_with(self.write, 100)
        self.task = asyncio.create_task(self._read())

    def write(self, events: Events) -> Awaitable[None] | None:
        self.written.append(events)
        unfinished, self.unfinished = self.unfinished, None
        return unfinished

    async def _read(self) -> None:
        async for events in self.generation:
            self.read.append(events)

    async def tell(self, *tokens: int) -> None:
        if any([self.generation.tell_token(0, token, 0.0) for token in tokens]):
            self.generation.hand_over()
        await turns()

    async def finish(self) -> None:
        self.generation.tell(0, ChoiceFinished(1, 0, FinishReason.LENGTH), 0.0)
        self.part.open_choices.clear()
        await asyncio.wait_for(self.task, 5)


async def wait(event: asyncio.Event) -> None:
    await event.wait()


async def turns(num_turns: int = 3) -> None:
    """Let the event loop go on."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def test_writer_takes_the_tokens_of_one_step_together_and_the_task_the_end() -> None:
    stream = Stream()
    await turns()
    await stream.tell(1, 2)
    await stream.tell(3)
    assert stream.written == [[(0, 1), (0, 2)], [(0, 3)]]
    assert stream.read == []
    stream.generation.tell_token(0, 4, 0.0)
    await stream.finish()
    assert [event if type(event) is int else type(event) for _, event in stream.read[0]] == [4, ChoiceFinished]


async def test_what_the_writer_leaves_is_awaited_first_and_the_task_takes_what_came_meanwhile() -> None:
    stream = Stream()
    await turns()
    is_writable = asyncio.Event()
    stream.unfinished = rest_of(wait(is_writable))
    assert stream.unfinished is not None
    await stream.tell(1)
    await stream.tell(2)
    await stream.tell(3)
    assert (stream.written, stream.read) == ([[(0, 1)]], [])
    is_writable.set()
    await turns()
    assert stream.read == [[(0, 2), (0, 3)]]
    await stream.tell(4)
    assert stream.written[1:] == [[(0, 4)]]
    await stream.finish()


async def test_no_more_waits_than_may_and_what_waited_is_let_go() -> None:
    stream = Stream()
    await turns()
    is_writable = asyncio.Event()
    stream.unfinished = rest_of(wait(is_writable))
    await stream.tell(1)
    await stream.tell(*range(100))
    assert stream.part.open_choices == {0}
    await stream.tell(100)
    assert not stream.part.open_choices, "it is given up although the task cannot be told yet"
    is_writable.set()
    with pytest.raises(OverloadedLinkError, match="the client left more than 100 tokens unread"):
        await asyncio.wait_for(stream.task, 5)
    assert (stream.written, stream.read) == ([[(0, 1)]], [])


async def test_fault_of_the_writer_ends_the_iteration() -> None:
    stream = Stream()
    await turns()
    stream.generation.write_with(lambda events: events[5], None)  # type: ignore[arg-type,return-value]
    await stream.tell(1)
    with pytest.raises(IndexError):
        await asyncio.wait_for(stream.task, 5)


async def test_choice_given_up_by_the_writer_ends_the_iteration() -> None:
    stream = Stream()
    await turns()
    stream.generation.write_with(lambda events: stream.generation.abort_choice(0, len(events)), None)
    await stream.tell(1)
    await asyncio.wait_for(stream.task, 5)
    assert not stream.part.open_choices


async def test_rest_of_a_coroutine_that_is_not_awaited_to_its_end_is_closed() -> None:
    was_closed = False

    async def wait_for_ever() -> None:
        nonlocal was_closed
        try:
            await asyncio.Event().wait()
        finally:
            was_closed = True

    rest = rest_of(wait_for_ever())
    assert rest is not None

    async def awaits() -> None:
        await rest

    task = asyncio.create_task(awaits())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert was_closed


async def test_coroutine_that_never_waits_leaves_nothing() -> None:
    seen = []

    async def at_once() -> None:
        seen.append(1)

    assert rest_of(at_once()) is None
    assert seen == [1]
