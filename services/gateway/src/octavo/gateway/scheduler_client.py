"""The gateway's end of the stream to the scheduler: owns request numbers and what each running request waits for.

Requests outlive the link. When it is lost they wait, and are submitted to the next scheduler with the tokens that have
come; so do new requests that find no scheduler. Neither waits for longer than `recovery_timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence

import structlog

from octavo.common.errors import (
    DeadlineExceededError,
    LinkClosedError,
    NotReadyError,
    OctavoError,
    QueueFullError,
    from_reason,
)
from octavo.common.links import Link
from octavo.common.messages.generation import (
    Abort,
    ChoiceFinished,
    Explain,
    Explained,
    Forget,
    GatewayMessage,
    ModelInfo,
    PromptLogprobs,
    RequestStarted,
    SampledToken,
    SchedulerLoad,
    SchedulerMessage,
    SchedulerStatus,
    TokenBatch,
)
from octavo.gateway import metrics
from octavo.gateway.request_part import MAX_LOSSES_IN_A_ROW, Part, Prompt

log = structlog.get_logger()

GenerationEvent = RequestStarted | PromptLogprobs | int | SampledToken | ChoiceFinished
"""A token without log-probabilities is its id alone, since most are."""
Connect = Callable[[], Awaitable[Link[GatewayMessage, SchedulerMessage]]]

_NOT_CONNECTED = SchedulerStatus(ready=False, reason="the scheduler has not been reached yet", model=None)
_LATE = "the request has not ended within its time"
_MAX_REQUEST_NO = 2**31 - 1
_FIRST_RETRY_S, _MAX_RETRY_S = 0.05, 0.5
_NOT_THERE_YET = (FileNotFoundError, ConnectionRefusedError)
"""A service that starts, or starts again: no news for an operator."""
_DEADLINE_CHECK_S = 0.25
_QUERY_TIMEOUT_S = 5.0


class Generation:
    """The events of one client request, its prompts numbered 0, 1, ..., with `n` choices each.

    A context manager: leaving it aborts what is still open, exactly once, and nothing after a normal end. Iterating
    gives everything that came since the last time, as pairs of (choice, event), where choice is
    prompt index * n + choice index. The iteration ends when all choices have ended, or raises the OctavoError that
    ended the request.
    """

    __slots__ = (
        "_client",
        "_deadline",
        "_error",
        "_events",
        "_n",
        "_num_open_parts",
        "_parts",
        "_waiter",
        "last_news_s",
        "num_cached_tokens",
        "refused_by",
        "traceparent",
    )

    def __init__(self, client: SchedulerClient, num_prompts: int, n: int) -> None:
        self._client = client
        self._n = n
        self._parts: list[Part] = []
        self._num_open_parts = num_prompts
        self._events: list[tuple[int, GenerationEvent]] = []
        self._error: OctavoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.traceparent = ""
        """Context for spans of it; empty if it is not traced."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache, over all prompts."""
        self.last_news_s = 0.0
        """Time of the event loop at which the scheduler last said something about it."""
        self.refused_by: set[str] = set()
        """Pools whose schedulers did not take it."""

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self._client._abandon(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[tuple[int, GenerationEvent]]:
        while not self._events:
            if self._error is not None:
                raise self._error
            if not self._num_open_parts:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._events = self._events, []
        return events

    def abort_choice(self, choice: int, num_tokens: int) -> None:
        """Give up one choice, whose text has come to an end after `num_tokens` tokens, before its tokens did."""
        part = self._parts[choice // self._n]
        self._client._abort_choice(part, choice % self._n, num_tokens)

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

    def _tell(self, choice: int, event: GenerationEvent, now_s: float) -> None:
        """What is told in one turn of the event loop is taken together."""
        self._events.append((choice, event))
        self.last_news_s = now_s
        self._wake()

    def _expire(self) -> None:
        self._client._fail(self, DeadlineExceededError(_LATE))

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None


class SchedulerClient:
    """Keeps a link to the scheduler while `run` runs, and starts generations on it."""

    def __init__(
        self,
        connect: Connect,
        *,
        queue_timeout_s: float = 600.0,
        token_timeout_s: float = 120.0,
        recovery_timeout_s: float = 60.0,
        max_open_requests: int = 8192,
    ) -> None:
        self._connect = connect
        self._queue_timeout_s, self._token_timeout_s = queue_timeout_s, token_timeout_s
        self._recovery_timeout_s = recovery_timeout_s
        self._max_open_requests = max_open_requests
        self._link: Link[GatewayMessage, SchedulerMessage] | None = None
        self._status = _NOT_CONNECTED
        self.epoch = 0
        """The highest of the schedulers met; one with a lower one has been replaced."""
        self.load = SchedulerLoad()
        """As the scheduler told it last."""
        self._model: ModelInfo | None = None
        self._away_since: float | None = None
        """When the scheduler ceased to take requests, by the event loop's clock; None while it does."""
        self._refusal = ""
        self._next_request_no = 1
        self._parts: dict[int, Part] = {}
        self._query_nos = itertools.count(1)
        self._queries: dict[int, asyncio.Future[bytes]] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called when there is news of the scheduler's state."""
        self.on_failed: Callable[[Generation, OctavoError], bool] = lambda generation, error: False
        """Called when the scheduler fails a request; true if another client has it now."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def why_not_ready(self) -> str:
        """Empty when requests can be served, else the reason, for people."""
        return self._refusal or ("" if self._status.ready else self._status.reason or "the scheduler is not ready")

    @property
    def why_refused(self) -> str:
        """Empty when a request that comes now is served or may wait, else the reason, for people."""
        if self._refusal or self._model is None:
            return self._refusal or self.why_not_ready
        return self.why_not_ready if self._is_away_for_long else ""

    @property
    def _is_away_for_long(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        return self._away_since is not None and now_s - self._away_since > self._recovery_timeout_s

    @property
    def takes_requests(self) -> bool:
        """There is a scheduler that has a model. It may have lost its worker for now: then requests wait there."""
        return self._link is not None and self._status.model is not None and not self._status.is_draining

    @property
    def model(self) -> ModelInfo | None:
        """The model that is served, or was last; None until a scheduler has told it."""
        return self._model

    @property
    def num_open_requests(self) -> int:
        return len(self._parts)

    @property
    def is_connected(self) -> bool:
        """There is a link to the scheduler."""
        return self._link is not None

    @property
    def stranded(self) -> list[Generation]:
        """Those that another scheduler could go on with: this one is lost, lacks its worker, or wants no new ones."""
        if self._status.ready:
            return []
        is_leaving = self._status.is_draining
        parts = self._parts.values()
        return list({part.generation: None for part in parts if not (is_leaving and part.is_sent)})

    def has(self, generation: Generation) -> bool:
        """Whether some of it is open here."""
        return any(self._parts.get(part.request_no) is part for part in generation.parts)

    def release(self, generation: Generation) -> bool:
        """Give it up, for another client to `adopt`. False if it was lost too often: then it has failed."""
        is_lost = False
        for part in generation.parts:
            if self._remove(part) and part.is_sent:
                self._send(Abort(part.request_no))
            is_lost = not part.lose() or is_lost
        if is_lost:
            self._fail(generation, LinkClosedError("the connection to the scheduler was lost"))
        return not is_lost

    def adopt(self, generation: Generation) -> None:
        """Go on with what another client has released."""
        generation._client = self
        generation.last_news_s = asyncio.get_running_loop().time()
        for part in generation.parts:
            part.request_no = self._next_request_no
            self._next_request_no += 1
            self._parts[part.request_no] = part
            self._idle.clear()
            if self.takes_requests:
                metrics.RESUBMITTED_REQUESTS.inc(part.num_losses > 0)
                self._submit(part)

    def submit(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        cache_salt: bytes = b"",
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> Generation:
        """Start a generation, to be entered at once with `with`. All prompts have the same number of choices.

        What has not ended after `timeout_s` fails with DeadlineExceededError. Raises that, NotReadyError and
        QueueFullError.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise DeadlineExceededError(_LATE)
        if reason := self.why_refused:
            raise NotReadyError(reason)
        if len(self._parts) + len(prompts) > self._max_open_requests:
            raise QueueFullError(f"this gateway already has {len(self._parts)} requests open")
        if self._next_request_no + len(prompts) > _MAX_REQUEST_NO and self._link is not None:
            self._link.close()  # numbers are used up; on the next link they begin anew
        n = prompts[0].params.n
        generation = Generation(self, len(prompts), n)
        generation.traceparent = traceparent
        loop = asyncio.get_running_loop()
        generation.last_news_s = loop.time()
        if timeout_s is not None:
            generation._deadline = loop.call_later(timeout_s, generation._expire)
        for index, prompt in enumerate(prompts):
            part_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            part = Part(generation, self._next_request_no, part_id, index, prompt, cache_salt)
            self._next_request_no += 1
            generation._parts.append(part)
            self._parts[part.request_no] = part
            self._idle.clear()
            if self.takes_requests:
                self._submit(part)
        return generation

    def forget(self, request_id: str, cache_salt: bytes) -> None:
        """Give up what a request keeps for branches. Raises NotReadyError."""
        if self._link is None:
            raise NotReadyError(self.why_not_ready or _NOT_CONNECTED.reason)
        self._link.send(Forget(request_id, cache_salt))

    async def explain(self, request_id: str, salt_head: bytes) -> bytes:
        """What happened to a request whose salt begins so, as JSON; empty if the scheduler does not know it.

        Raises NotReadyError.
        """
        if self._link is None:
            raise NotReadyError(self.why_not_ready or _NOT_CONNECTED.reason)
        query_no = next(self._query_nos) & _MAX_REQUEST_NO
        answer = self._queries[query_no] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(Explain(query_no, request_id, salt_head))
            return await asyncio.wait_for(answer, _QUERY_TIMEOUT_S)
        except TimeoutError:
            raise NotReadyError(f"the scheduler has not answered within {_QUERY_TIMEOUT_S} s") from None
        finally:
            self._queries.pop(query_no, None)

    async def run(self) -> None:
        """Keep connected until cancelled."""
        watchdog = asyncio.create_task(self._watch_deadlines())
        retry_s = _FIRST_RETRY_S
        try:
            while True:
                try:
                    await self._run_link(await self._connect())
                    retry_s = _FIRST_RETRY_S
                except (OSError, TimeoutError, OctavoError) as error:
                    reason = f"the scheduler cannot be reached: {error}"
                    is_news = reason != self._status.reason and not isinstance(error, _NOT_THERE_YET)
                    tell = log.warning if is_news else log.debug
                    tell("scheduler not reached", error=str(error), retry_s=retry_s)
                    self._set_status(SchedulerStatus(False, reason, None))
                await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
        finally:
            watchdog.cancel()

    def refuse_new_work(self, reason: str) -> None:
        """Not ready from here on; what runs goes on."""
        self._refusal = reason

    async def drain(self, grace_s: float) -> None:
        """Return when nothing runs; what still does after `grace_s` fails with NotReadyError."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        for generation in {part.generation for part in self._parts.values()}:
            self._fail(generation, NotReadyError("the server is shutting down"))

    async def _run_link(self, link: Link[GatewayMessage, SchedulerMessage]) -> None:
        closed: asyncio.Future[OctavoError | None] = asyncio.get_running_loop().create_future()
        self._link = link
        self._set_status(SchedulerStatus(False, "the scheduler has not told its status yet", None))
        link.bind(self._on_message, lambda error: None if closed.done() else closed.set_result(error))
        try:
            error = await closed
        finally:
            self._link = None
            cause = closed.result() if closed.done() and not closed.cancelled() else None
            self._on_link_lost("the connection to the scheduler was lost" + (f": {cause}" if cause else ""))
            link.close()
        log.warning("scheduler lost", error=str(error))

    def _on_link_lost(self, reason: str) -> None:
        lost = LinkClosedError(reason)
        self._set_status(SchedulerStatus(False, lost.message, None))
        parts, self._parts = list(self._parts.values()), {}
        for request_no, part in enumerate(parts, start=1):
            part.request_no = request_no
            self._parts[request_no] = part
        self._next_request_no = 1 + len(parts)
        for part in parts:
            if not part.lose():
                log.error("request given up", request_id=part.request_id, num_schedulers_lost=MAX_LOSSES_IN_A_ROW)
                self._fail(part.generation, lost)
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(NotReadyError(lost.message))

    def _set_status(self, status: SchedulerStatus) -> None:
        self._status = status
        self.on_change()
        if status.model is not None:
            if self._model is not None and not _can_go_on(self._model, status.model):
                self._fail_waiting(NotReadyError(f"the model was replaced by {status.model.model_name!r}"))
            self._model = status.model
        now_s = asyncio.get_running_loop().time()
        if not self.takes_requests:
            self._away_since = now_s if self._away_since is None else self._away_since
            return
        self._away_since = None
        for part in self._parts.values():
            if not part.is_sent:
                part.generation.last_news_s = now_s
                metrics.RESUBMITTED_REQUESTS.inc(part.num_losses > 0)
                self._submit(part)

    def _submit(self, part: Part) -> None:
        part.is_sent = True
        self._send(part.submit())

    def _fail_waiting(self, error: OctavoError) -> None:
        """End the requests that no scheduler has."""
        for generation in {part.generation for part in self._parts.values() if not part.is_sent}:
            self._fail(generation, error)

    def _on_message(self, message: SchedulerMessage) -> None:
        if isinstance(message, SchedulerStatus):
            if message.epoch < self.epoch:
                log.warning("scheduler refused", epoch=message.epoch, highest_epoch=self.epoch)
                assert self._link is not None
                self._link.close()
                return
            self.epoch = message.epoch
            if message != self._status:
                log.info("scheduler status changed", ready=message.ready, reason=message.reason)
            self._set_status(message)
        elif isinstance(message, Explained):
            answer = self._queries.get(message.query_no)
            if answer is not None and not answer.done():
                answer.set_result(message.explanation)
        elif isinstance(message, SchedulerLoad):
            self.load = message
        else:
            self._on_tokens(message)

    def _on_tokens(self, batch: TokenBatch) -> None:
        parts, now_s = self._parts, asyncio.get_running_loop().time()
        for started in batch.started:
            if part := parts.get(started.request_no):
                part.generation.last_news_s = now_s
                if part.start(started):
                    part.generation.num_cached_tokens += started.num_cached_tokens
                    part.generation._tell(part.first_choice, started, now_s)
        for request_no, told in batch.prompt_logprobs:
            if (part := parts.get(request_no)) and (new := part.news_of_prompt(told)):
                part.generation._tell(part.first_choice, new, now_s)
        tokens: Sequence[int | SampledToken] = batch.tokens if batch.logprobs else batch.token_ids
        for request_no, choice_index, token_id, token in zip(
            batch.request_nos, batch.choice_indexes, batch.token_ids, tokens, strict=True
        ):
            if part := parts.get(request_no):
                part.outputs[choice_index].append(token_id)
                part.num_losses = 0
                part.generation._tell(part.first_choice + choice_index, token, now_s)
        for end in batch.finished:
            if (part := parts.get(end.request_no)) and end.choice_index in part.open_choices:
                part.generation._tell(part.first_choice + end.choice_index, end, now_s)
                self._close_choice(part, end.choice_index)
        for failed in batch.failed:
            if part := parts.get(failed.request_no):
                error = from_reason(failed.reason, failed.message)
                if not self.on_failed(part.generation, error):
                    self._remove(part)
                    self._fail(part.generation, error)

    def _close_choice(self, part: Part, choice_index: int) -> None:
        part.open_choices.discard(choice_index)
        if not part.open_choices and self._remove(part):
            part.generation._num_open_parts -= 1

    def _abort_choice(self, part: Part, choice_index: int, num_tokens: int) -> None:
        if choice_index in part.open_choices and self._parts.get(part.request_no) is part:
            if part.is_sent:
                self._send(Abort(part.request_no, choice_index, num_tokens if part.prompt.keep_s else None))
            self._close_choice(part, choice_index)

    def _abandon(self, generation: Generation) -> None:
        """Abort all parts that are open."""
        if generation._deadline is not None:
            generation._deadline.cancel()
        for part in generation._parts:
            if self._remove(part) and part.is_sent:
                self._send(Abort(part.request_no))

    def _remove(self, part: Part) -> bool:
        """False if it was removed before; another one may have its number by now."""
        if self._parts.get(part.request_no) is not part:
            return False
        del self._parts[part.request_no]
        if not self._parts:
            self._idle.set()
        return True

    def _fail(self, generation: Generation, error: OctavoError) -> None:
        generation._error = generation._error or error
        self._abandon(generation)
        generation._wake()

    def _send(self, message: GatewayMessage) -> None:
        if self._link is not None:
            self._link.send(message)

    async def _watch_deadlines(self) -> None:
        while True:
            await asyncio.sleep(_DEADLINE_CHECK_S)
            now_s = asyncio.get_running_loop().time()
            if self._is_away_for_long:
                reason = f"no scheduler to serve this within {self._recovery_timeout_s} s: {self.why_not_ready}"
                self._fail_waiting(NotReadyError(reason))
            for generation in {part.generation for part in self._parts.values() if part.is_sent}:
                limit_s = self._token_timeout_s if generation.must_give_tokens else self._queue_timeout_s
                if now_s - generation.last_news_s > limit_s:
                    state = "gave no token" if generation.is_started else "found no room for the prompt"
                    self._fail(generation, NotReadyError(f"the scheduler {state} within {limit_s} s"))


def _can_go_on(before: ModelInfo, now: ModelInfo) -> bool:
    """Whether token ids mean the same to both."""
    return (before.model_name, before.vocab_size, before.eos_token_ids) == (
        now.model_name,
        now.vocab_size,
        now.eos_token_ids,
    )
