"""Writes the events of one stream: in the turn of the event loop in which its tokens come, without waking its task."""

from __future__ import annotations

import time
import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

from starlette.types import Send

from octavo.gateway.generation import Events, Generation
from octavo.gateway.generation_job import AnswerFormat
from octavo.gateway.generation_run import GenerationRun
from octavo.gateway.sse import TextEvents


class EventWriter:
    """Owns what stands around the texts of each choice. What it keeps for a token is little, so that many streams stay
    in the processor's caches."""

    __slots__ = ("_answer_format", "_generation", "_outputs", "_run", "_send", "_texts", "_usage", "_write_chunk")

    def __init__(
        self,
        run: GenerationRun,
        generation: Generation,
        answer_format: AnswerFormat,
        send: Send,
        write_chunk: Callable[[bytes], bool],
    ) -> None:
        """`write_chunk` is a shorter way than `send`; false if it cannot be taken now."""
        self._run, self._generation, self._answer_format = run, generation, answer_format
        self._send, self._write_chunk = send, write_chunk
        self._outputs = run.outputs
        self._usage = partial(run.usage, generation)
        self._texts: list[TextEvents | None] = [None] * len(run.outputs)

    def write(self, events: Events) -> Awaitable[None] | None:
        """A writer of `Generation.write_with`."""
        chunk = self._text(events) if len(events) == 1 else None
        if chunk is None:
            chunk = self.chunk(events)
        return rest_of(self.send(chunk)) if chunk and not self._write_chunk(chunk) else None

    def chunk(self, events: Events) -> bytes:
        """What the events bring, as it is to be written."""
        chunk = b""
        for choice, delta in self._run.take(events, self._generation):
            chunk += self._answer_format.chunk(choice, delta, self._usage)
            self._texts[choice] = self._answer_format.texts(choice)
        return chunk

    def _text(self, events: Events) -> bytes | None:
        """The same of one token, if its text leaves at once and alone; else None."""
        ((choice, token),) = events
        texts = self._texts[choice]
        if texts is None or type(token) is not int:
            return None
        output = self._outputs[choice]
        text = output.pass_on(token)
        if text is None:
            return None
        self._run.observe_tokens(output, 1, time.perf_counter())
        return texts.event(text)

    def send(self, chunk: bytes, *, more: bool = True) -> Awaitable[None]:
        """Write it, and wait until there is room for the next."""
        return self._send({"type": "http.response.body", "body": chunk, "more_body": more})


def rest_of(awaitable: Awaitable[None]) -> Awaitable[None] | None:
    """Run it outside of any task until it ends, or waits: then the result is what is left of it."""
    turns = awaitable.__await__()
    try:
        awaited = next(turns)
    except StopIteration:
        return None
    return _go_on(turns, awaited)


@types.coroutine
def _go_on(turns: Generator[Any, None, None], awaited: Any) -> Generator[Any, None, None]:
    try:
        yield awaited
    except BaseException:
        turns.close()
        raise
    yield from turns
