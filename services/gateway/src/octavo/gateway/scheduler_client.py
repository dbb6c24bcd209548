"""The gateway's end of the stream to the scheduler: owns request numbers and what each running request waits for.

Requests outlive the link. When it is lost they wait, and are submitted to the next scheduler with the tokens that have
come; so do new requests that find no scheduler. Neither waits for longer than `recovery_timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence

import structlog

from octavo.common.errors import (
    LinkClosedError,
    NotReadyError,
    OctavoError,
    QueueFullError,
    from_reason,
)
from octavo.common.links import Link
from octavo.common.messages.generation import (
    Abort,
    Explained,
    Forget,
    GatewayMessage,
    ModelInfo,
    SampledToken,
    SchedulerLoad,
    SchedulerMessage,
    SchedulerStatus,
    TokenBatch,
)
from octavo.gateway import metrics
from octavo.gateway.generation import Generation
from octavo.gateway.request_part import MAX_LOSSES_IN_A_ROW, Part, Prompt
from octavo.gateway.scheduler_queries import SchedulerQueries

log = structlog.get_logger()

Connect = Callable[[], Awaitable[Link[GatewayMessage, SchedulerMessage]]]

_NOT_CONNECTED = SchedulerStatus(ready=False, reason="the scheduler has not been reached yet", model=None)
_MAX_REQUEST_NO = 2**31 - 1
_FIRST_RETRY_S, _MAX_RETRY_S = 0.05, 0.5
_NOT_THERE_YET = (FileNotFoundError, ConnectionRefusedError)
"""A service that starts, or starts again: no news for an operator."""
_DEADLINE_CHECK_S = 0.25


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
        self._to_hand_over: list[Generation] = []
        self._queries = SchedulerQueries()
        self.on_change: Callable[[], None] = lambda: None
        """Called when there is news of the scheduler's state."""
        self.on_failed: Callable[[Generation, OctavoError], bool] = lambda generation, error: False
        """Called when the scheduler fails a request; true if another client has it now."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def why_not_ready(self) -> str:
        """Empty when requests can be served, else the reason, for people."""
        if self._refusal or not self._status.ready:
            return self._refusal or self._status.reason or "the scheduler is not ready"
        return "the scheduler gives no sign of life" if self._link is not None and self._link.is_quiet else ""

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
        self.abandon(generation)
        can_go_on = all([part.lose() for part in generation.parts])
        if not can_go_on:
            generation.fail(LinkClosedError("the connection to the scheduler was lost"))
        return can_go_on

    def adopt(self, generation: Generation) -> None:
        """Go on with what another client has released."""
        generation.client = self
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
        if reason := self.why_refused:
            raise NotReadyError(reason)
        if len(self._parts) + len(prompts) > self._max_open_requests:
            raise QueueFullError(f"this gateway already has {len(self._parts)} requests open")
        if self._next_request_no + len(prompts) > _MAX_REQUEST_NO and self._link is not None:
            self._link.close()  # numbers are used up; on the next link they begin anew
        generation = Generation(self, prompts[0].params.n, timeout_s, traceparent)
        for index, prompt in enumerate(prompts):
            part_id = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            part = Part(generation, self._next_request_no, part_id, index, prompt, cache_salt)
            self._next_request_no += 1
            generation.add(part)
            self._parts[part.request_no] = part
            self._idle.clear()
            if self.takes_requests:
                self._submit(part)
        return generation

    def abort_choice(self, part: Part, choice_index: int, num_tokens: int) -> None:
        """See `Client`."""
        if choice_index in part.open_choices and self._parts.get(part.request_no) is part:
            if part.is_sent:
                self._send(Abort(part.request_no, choice_index, num_tokens if part.prompt.keep_s else None))
            self._close_choice(part, choice_index)

    def abandon(self, generation: Generation) -> None:
        """See `Client`."""
        for part in generation.parts:
            if self._remove(part) and part.is_sent:
                self._send(Abort(part.request_no))

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
        return await self._queries.explain(self._link, request_id, salt_head)

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
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        for generation in {part.generation for part in self._parts.values()}:
            generation.fail(NotReadyError("the server is shutting down"))

    async def _run_link(self, link: Link[GatewayMessage, SchedulerMessage]) -> None:
        self._loop = asyncio.get_running_loop()
        closed: asyncio.Future[OctavoError | None] = self._loop.create_future()
        self._link = link
        self._set_status(SchedulerStatus(False, "the scheduler has not told its status yet", None))
        link.bind(self._on_message, lambda error: None if closed.done() else closed.set_result(error), self._hand_over)
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
                part.generation.fail(lost)
        self._queries.fail(NotReadyError(lost.message))

    def _set_status(self, status: SchedulerStatus) -> None:
        self._status = status
        self.on_change()
        if status.model is not None:
            if self._model is not None and not self._model.has_tokens_of(status.model):
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
            generation.fail(error)

    def _on_message(self, message: SchedulerMessage) -> None:
        if isinstance(message, TokenBatch):
            self._on_tokens(message)
        elif isinstance(message, SchedulerStatus):
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
            self._queries.on_answer(message)
        else:
            self.load = message

    def _on_tokens(self, batch: TokenBatch) -> None:
        parts, now_s = self._parts, self._loop.time()
        for started in batch.started:
            if part := parts.get(started.request_no):
                part.generation.last_news_s = now_s
                if part.start(started):
                    part.generation.num_cached_tokens += started.num_cached_tokens
                    part.generation.tell(part.first_choice, started, now_s)
        for request_no, told in batch.prompt_logprobs:
            if (part := parts.get(request_no)) and (new := part.news_of_prompt(told)):
                part.generation.tell(part.first_choice, new, now_s)
        tokens: Sequence[int | SampledToken] = batch.token_ids
        if batch.logprobs:
            tokens = [token.token_id if token.logprobs is None else token for token in batch.tokens]
        for request_no, choice_index, token_id, token in zip(
            batch.request_nos, batch.choice_indexes, batch.token_ids, tokens, strict=True
        ):
            if part := parts.get(request_no):
                part.outputs[choice_index].append(token_id)
                part.num_losses = 0
                if part.generation.tell_token(part.first_choice + choice_index, token, now_s):
                    self._to_hand_over.append(part.generation)
        for end in batch.finished:
            if (part := parts.get(end.request_no)) and end.choice_index in part.open_choices:
                part.generation.tell(part.first_choice + end.choice_index, end, now_s)
                self._close_choice(part, end.choice_index)
        for failed in batch.failed:
            if part := parts.get(failed.request_no):
                error = from_reason(failed.reason, failed.message)
                if not self.on_failed(part.generation, error):
                    self._remove(part)
                    part.generation.fail(error)

    def _hand_over(self) -> None:
        """After all messages that came together: what several steps brought at once leaves in one write."""
        generations, self._to_hand_over = self._to_hand_over, []
        for generation in generations:
            generation.hand_over()

    def _close_choice(self, part: Part, choice_index: int) -> None:
        part.open_choices.discard(choice_index)
        if not part.open_choices:
            self._remove(part)

    def _remove(self, part: Part) -> bool:
        """False if it was removed before; another one may have its number by now."""
        if self._parts.get(part.request_no) is not part:
            return False
        del self._parts[part.request_no]
        if not self._parts:
            self._idle.set()
        return True

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
            self._fail_overdue(now_s)

    def _fail_overdue(self, now_s: float) -> None:
        for generation in {part.generation for part in self._parts.values() if part.is_sent}:
            limit_s = self._token_timeout_s if generation.must_give_tokens else self._queue_timeout_s
            if now_s - generation.last_news_s > limit_s:
                state = "gave no token" if generation.is_started else "found no room for the prompt"
                generation.fail(NotReadyError(f"the scheduler {state} within {limit_s} s"))
