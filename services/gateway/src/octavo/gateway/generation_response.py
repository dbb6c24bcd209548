"""Runs one generation and writes its answer: as events while it grows, or as one body at its end."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from octavo.common.errors import OctavoError, ProtocolError
from octavo.common.messages.generation import ChoiceFinished, PromptLogprobs, RequestStarted, SampledToken
from octavo.gateway import metrics
from octavo.gateway.best_of import ChoiceRanking
from octavo.gateway.choice_output import ChoiceOutput, Delta, OutputRules
from octavo.gateway.generation import Events, Generation
from octavo.gateway.http_errors import ErrorReport, report_of
from octavo.gateway.prompt_record import PromptRecord
from octavo.gateway.request_account import RequestAccount
from octavo.gateway.request_part import Prompt
from octavo.gateway.worker_groups import WorkerGroups

log = structlog.get_logger()

MAX_UNREAD_TOKENS = 262_144
"""Tokens of one stream, about 100 bytes each, that may wait for its client; with log-probabilities, each that is listed
counts as another token."""
CLIENT_GONE_STATUS = 499
"""Logged for a client that left; nobody receives it."""


class AnswerFormat(Protocol):
    """How a route writes its answers. One object per request."""

    def start(self, usage: dict[str, Any]) -> bytes:
        """The events of a stream before the first one of any choice."""

    def chunk(self, choice: int, delta: Delta) -> bytes:
        """The events for what is new of one choice; empty if that shows nothing."""

    async def end(self, usage: dict[str, Any]) -> bytes:
        """The events that follow the last one of any choice."""

    def failure(self, report: ErrorReport) -> bytes:
        """The event that ends a stream early."""

    async def body(self, choices: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A checked request."""

    request_id: str
    prompts: Sequence[Prompt]
    records: Sequence[PromptRecord]
    """What becomes known of each prompt."""
    num_returned: int
    """Choices of each prompt in the answer. Where more are generated, it has the best ones."""
    cache_salt: bytes
    rules: OutputRules
    answer_format: AnswerFormat
    is_stream: bool
    received_s: float
    """`time.perf_counter()` at the request's arrival."""
    account: RequestAccount
    timeout_s: float | None = None
    """From then on."""

    @property
    def max_unread(self) -> int | None:
        """Tokens that may wait for the client; None for a beam search, whose tokens come all at once."""
        params = self.prompts[0].params
        return None if params.beam_width else MAX_UNREAD_TOKENS // (1 + (params.num_logprobs or 0))

    def seconds_left(self) -> float | None:
        """Until the request's deadline; None if it has none."""
        return None if self.timeout_s is None else self.timeout_s - (time.perf_counter() - self.received_s)


class GenerationResponse(Response):
    """Generates when it is called, so that whatever ends the call also ends the generation.

    Headers are sent with the first news from the scheduler: a request that it refuses still gets its own status.
    When the client leaves, the generation is aborted at once.
    """

    def __init__(self, client: WorkerGroups, job: GenerationJob) -> None:
        super().__init__()
        self._client, self._job = client, job
        self._run = _Run(job)
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body = scope.get("state", {}).get("send_body", send)
        answer = asyncio.ensure_future(self._answer(send, send_body))
        departure = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            departure.cancel()
            is_gone = not answer.done()
            answer.cancel()
        if not is_gone and not isinstance(answer.exception(), OSError):
            answer.result()
            return
        scope.setdefault("state", {})["client_is_gone"] = True
        metrics.CLIENT_DISCONNECTS.inc()
        await asyncio.wait({answer})

    async def _answer(self, send: Send, send_body: Send) -> None:
        job = self._job
        await job.account.charge_prompt(sum(len(prompt.token_ids) for prompt in job.prompts))
        prompts = [job.account.own(prompt) for prompt in job.prompts]
        generation = self._client.submit(
            job.request_id, prompts, job.cache_salt, job.seconds_left(), job.account.traceparent
        )
        self._run.submitted_s = time.perf_counter()
        unfinished = "error"
        try:
            with generation, metrics.OPEN_GENERATIONS.track_inprogress():
                if job.is_stream:
                    await self._stream(generation, send, send_body)
                else:
                    await self._collect(generation, send)
            self._run.observe_end()
        except (asyncio.CancelledError, OSError):
            unfinished = "abort"
            raise
        finally:
            self._run.observe_choices(unfinished)
            job.account.num_cached_tokens = generation.num_cached_tokens
            job.account.num_output_tokens = self._run.num_output_tokens

    async def _stream(self, generation: Generation, send: Send, send_body: Send) -> None:
        job, run, answer_format = self._job, self._run, self._job.answer_format

        def write(events: Events) -> Awaitable[None] | None:
            chunk = b""
            for choice, delta in run.take(events, generation):
                chunk += answer_format.chunk(choice, delta)
            return rest_of(send_body(_piece(chunk))) if chunk else None

        try:
            async for events in generation:
                chunk = b""
                if not self._has_begun:
                    await self._begin(send, b"text/event-stream; charset=utf-8")
                    chunk = answer_format.start(run.usage(generation))
                deltas = run.take(events, generation)
                for choice, delta in deltas:
                    chunk += answer_format.chunk(choice, delta)
                if chunk:
                    await send_body(_piece(chunk))
                    if deltas and not run.has_shown:
                        run.observe_first_output()
                        generation.write_with(write, job.max_unread)
            run.check_all_ended()
            end = await answer_format.end(run.usage(generation))
        except Exception as error:
            if not self._has_begun or isinstance(error, OSError):
                raise
            if not isinstance(error, OctavoError):
                log.exception("stream failed", request_id=job.request_id)
            end = answer_format.failure(report_of(error))
        await send_body({"type": "http.response.body", "body": end, "more_body": False})

    async def _collect(self, generation: Generation, send: Send) -> None:
        run = self._run
        collected: list[list[Delta]] = [[] for _ in run.outputs]
        async for events in generation:
            for choice, delta in run.take(events, generation):
                collected[choice].append(delta)
            if run.first_token_s is not None and not run.has_shown:
                run.observe_first_output()
        run.check_all_ended()
        choices = [_joined(collected[choice]) for choice in run.returned_choices()]
        body = orjson.dumps(await self._job.answer_format.body(choices, run.usage(generation)))
        await self._begin(send, b"application/json", len(body))
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, send: Send, media_type: bytes, length: int | None = None) -> None:
        self._has_begun = True
        headers = [(b"content-type", media_type)]
        if length is None:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(length).encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class _Run:
    """The outputs of all choices, and what is measured of them."""

    __slots__ = ("_job", "_ranking", "_started_s", "first_token_s", "has_shown", "outputs", "submitted_s")

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self.outputs = [
            ChoiceOutput(job.rules, record) for record in job.records for _ in range(job.prompts[0].params.n)
        ]
        self.submitted_s = 0.0
        self._started_s: float | None = None
        self.first_token_s: float | None = None
        """Of any choice."""
        self.has_shown = False
        """The client has some output, or will have it with the rest."""
        n = job.prompts[0].params.n
        self._ranking = ChoiceRanking(len(job.prompts), n) if n > job.num_returned else None

    @property
    def num_output_tokens(self) -> int:
        """Of all choices, so far."""
        return sum(output.num_tokens for output in self.outputs)

    def returned_choices(self) -> Sequence[int]:
        """Those that the answer shows, in its order."""
        return range(len(self.outputs)) if self._ranking is None else self._ranking.best(self._job.num_returned)

    def take(self, events: Events, generation: Generation) -> list[tuple[int, Delta]]:
        """What the events bring for the client, one delta per choice at most."""
        outputs = self.outputs
        num_new_tokens: dict[int, int] = {}
        for choice, event in events:
            output = outputs[choice]
            if output.is_closed:
                continue
            if type(event) is int:
                output.push(event)
            elif type(event) is SampledToken:
                if self._ranking is not None and not output.is_finished:
                    self._ranking.add(choice, event.logprobs)
                output.push(event.token_id, event.logprobs)
            elif type(event) is ChoiceFinished:
                output.finish(event)
                num_new_tokens.setdefault(choice, 0)
                continue
            else:
                if type(event) is RequestStarted:
                    self._observe_start()
                elif type(event) is PromptLogprobs:
                    self._job.records[choice // self._job.prompts[0].params.n].add(event)
                continue
            num_new_tokens[choice] = num_new_tokens.get(choice, 0) + 1
            if output.is_finished:
                generation.abort_choice(choice, output.num_tokens)
        now_s = time.perf_counter()
        deltas = []
        for choice, num_tokens in num_new_tokens.items():
            output = outputs[choice]
            if num_tokens:
                self._observe_tokens(output, num_tokens, now_s)
            delta = output.take()
            if delta is not None:
                deltas.append((choice, delta))
        return deltas

    def _observe_tokens(self, output: ChoiceOutput, num_tokens: int, now_s: float) -> None:
        last_s, output.last_token_s = output.last_token_s, now_s
        if last_s is not None:
            metrics.INTER_TOKEN_LATENCY_SECONDS.observe((now_s - last_s) / num_tokens, num_tokens)
            return
        output.first_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
            if self._started_s is not None:
                metrics.PREFILL_SECONDS.observe(now_s - self._started_s)

    def _observe_start(self) -> None:
        """Of several prompts, the first counts."""
        if self._started_s is None:
            self._started_s = time.perf_counter()
            metrics.QUEUE_SECONDS.observe(self._started_s - self.submitted_s)

    def observe_first_output(self) -> None:
        """It has been sent, or is kept for the whole answer."""
        self.has_shown = True
        if self.first_token_s is not None:
            shown_s = time.perf_counter() if self._job.is_stream else self.first_token_s
            self._job.account.ttft_s = shown_s - self._job.received_s
            metrics.TTFT_SECONDS.observe(self._job.account.ttft_s)

    def observe_choices(self, unfinished: str) -> None:
        """How each choice ended; `unfinished` is the reason of those that did not."""
        for output in self.outputs:
            metrics.FINISHED_CHOICES.labels(output.finish_reason or unfinished).inc()
            first_s, last_s = output.first_token_s, output.last_token_s
            if output.finish_reason is None or first_s is None or last_s is None:
                continue
            metrics.OUTPUT_LENGTH.observe(output.num_tokens)
            metrics.DECODE_SECONDS.observe(last_s - first_s)
            if output.num_tokens > 1:
                metrics.TPOT_SECONDS.observe((last_s - first_s) / (output.num_tokens - 1))

    def check_all_ended(self) -> None:
        if not all(output.is_closed for output in self.outputs):
            raise ProtocolError("the scheduler ended a request before all of its choices")

    def usage(self, generation: Generation) -> dict[str, Any]:
        num_prompt_tokens = generation.num_prompt_tokens
        num_output_tokens = self.num_output_tokens
        details = {"cached_tokens": generation.num_cached_tokens}
        if num_cut := sum(prompt.num_cut_tokens for prompt in self._job.prompts):
            details["truncated_tokens"] = num_cut
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": details,
        }

    def observe_end(self) -> None:
        for prompt in self._job.prompts:
            metrics.PROMPT_TOKENS.inc(len(prompt.token_ids))
            metrics.PROMPT_LENGTH.observe(len(prompt.token_ids))
        metrics.OUTPUT_TOKENS.inc(self.num_output_tokens)
        metrics.REQUEST_SECONDS.observe(time.perf_counter() - self._job.received_s)


def _piece(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


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


def _joined(deltas: list[Delta]) -> Delta:
    tokens = [token for delta in deltas for token in delta.tokens]
    return Delta("".join(d.text for d in deltas), tokens, deltas[-1].finish_reason, deltas[-1].stop_reason)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
