"""One client request on its way through a scheduler: owns what has come for it and was not yet taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from operator import attrgetter
from typing import Protocol

from octavo.common.errors import DeadlineExceededError, OctavoError, OverloadedLinkError
from octavo.common.messages.generation import ChoiceFinished, PromptLogprobs, RequestStarted, SampledToken
from octavo.gateway.request_part import Part

GenerationEvent = RequestStarted | PromptLogprobs | int | SampledToken | ChoiceFinished
"""A token without log-probabilities is its id alone, since most are."""

Events = list[tuple[int, GenerationEvent]]
"""Each with the choice that it belongs to."""
Writer = Callable[[Events], Awaitable[None] | None]
"""Takes events, and returns what of its work has to be awaited, if anything has."""

_open_choices = attrgetter("open_choices")
_LATE = "the request has not ended within its time"


class Client(Protocol):
    """Who brings a generation its events; the generation may pass from one to another."""

    def abort_choice(self, part: Part, choice_index: int, num_tokens: int) -> None:
        """Give up one choice, whose text has ended after `num_tokens` tokens."""

    def abandon(self, generation: Generation) -> None:
        """Give up all of it that is open; nothing if all has ended."""


class Generation:
    """The events of one client request, its prompts numbered 0, 1, ..., with `n` choices each.

    A context manager: leaving it aborts what is still open, exactly once, and nothing after a normal end. Iterating
    gives everything that came since the last time, as pairs of (choice, event), where choice is
    prompt index * n + choice index. The iteration ends when all choices have ended, or raises the OctavoError that
    ended the request.

    While the iterating task waits, a writer may take its place: it gets the tokens of a turn without waking the task,
    which is woken for other events, what the writer leaves to be awaited, its exceptions, and the end.
    """

    __slots__ = (
        "_deadline",
        "_error",
        "_events",
        "_has_given_up",
        "_loop",
        "_max_unread",
        "_n",
        "_parts",
        "_waiter",
        "_writer",
        "client",
        "last_news_s",
        "num_cached_tokens",
        "refused_by",
        "traceparent",
    )

    def __init__(self, client: Client, n: int, timeout_s: float | None = None, traceparent: str = "") -> None:
        """`timeout_s`: what has not ended by then fails with DeadlineExceededError, which this raises if it is past.

        `traceparent`: the context for spans of it; empty if it is not traced.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineExceededError(_LATE)
        self._loop = loop = asyncio.get_running_loop()
        self.client = client
        self._n = n
        self._parts: list[Part] = []
        self._events: Events = []
        self._error: OctavoError | None = None
        self._waiter: asyncio.Future[Awaitable[None] | None] | None = None
        self._writer: Writer | None = None
        self._max_unread: int | None = None
        self._has_given_up = False
        """A choice was given up, which may have been the last."""
        self._deadline = None if timeout_s is None else loop.call_later(timeout_s, self._expire)
        self.traceparent = traceparent
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache, over all prompts."""
        self.last_news_s = loop.time()
        """Time of the event loop at which the scheduler last said something about it."""
        self.refused_by: set[str] = set()
        """Pools whose schedulers did not take it."""

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        # Or this and they would keep each other alive; an error by the frames that it went through.
        self._parts, self._writer, self._error = [], None, None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Events:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._has_ended():
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            if (unfinished := await self._waiter) is not None:
                await unfinished
        events, self._events = self._events, []
        return events

    def abort_choice(self, choice: int, num_tokens: int) -> None:
        """Give up one choice, whose text has come to an end after `num_tokens` tokens, before its tokens did."""
        self._has_given_up = True
        self.client.abort_choice(self._parts[choice // self._n], choice % self._n, num_tokens)

    @property
    def parts(self) -> list[Part]:
        """Those that have not ended."""
        return [part for part in self._parts if part.open_choices]

    @property
    def is_branch(self) -> bool:
        """It goes on from something that only one scheduler has."""
        return any(part.prompt.branch is not None for part in self.parts)

    @property
    def num_prompt_tokens(self) -> int:
        """Over all prompts, with the tokens shared with a branch point once they are known."""
        return sum(part.num_prompt_tokens for part in self._parts)

    @property
    def is_started(self) -> bool:
        """All prompts have had their blocks."""
        return all(part.is_started for part in self._parts)

    @property
    def must_give_tokens(self) -> bool:
        """Tokens come one by one from now on; those of a beam search come at its end."""
        return self.is_started and not any(part.prompt.params.beam_width for part in self._parts)

    def add(self, part: Part) -> None:
        """Its next prompt."""
        self._parts.append(part)

    def tell(self, choice: int, event: GenerationEvent, now_s: float) -> None:
        """What is told in one turn of the event loop is taken together."""
        self._events.append((choice, event))
        self.last_news_s = now_s
        self._wake()

    def tell_token(self, choice: int, token: int | SampledToken, now_s: float) -> bool:
        """The same; True if `hand_over` is to be called when all that came with it has been told."""
        self._events.append((choice, token))
        self.last_news_s = now_s
        if self._writer is None:
            self._wake()
        if self._waiter is not None:
            return len(self._events) == 1
        if self._max_unread is not None and len(self._events) > self._max_unread:
            self._events.clear()
            self.fail(OverloadedLinkError(f"the client left more than {self._max_unread} tokens unread"))
        return False

    def write_with(self, writer: Writer, max_unread: int | None) -> None:
        """Have the tokens that come from now on taken by `writer`, unless the iterating task is at work.

        If more than `max_unread` wait while it is, the generation fails with OverloadedLinkError.
        """
        self._writer, self._max_unread = writer, max_unread

    def hand_over(self) -> None:
        """Let the writer take what was told."""
        if self._waiter is None or self._waiter.done() or self._writer is None:
            return
        events, self._events = self._events, []
        try:
            unfinished = self._writer(events)
        except Exception as error:
            self._waiter.set_exception(error)
            self._waiter = None
        else:
            if unfinished is not None or (self._has_given_up and self._has_ended()):
                self._wake(unfinished)

    def fail(self, error: OctavoError) -> None:
        """End it; the first error counts."""
        self._error = self._error or error
        self._end()
        self._wake()

    def _has_ended(self) -> bool:
        return not any(map(_open_choices, self._parts))

    def _expire(self) -> None:
        self.fail(DeadlineExceededError(_LATE))

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.client.abandon(self)

    def _wake(self, unfinished: Awaitable[None] | None = None) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(unfinished)
            self._waiter = None
