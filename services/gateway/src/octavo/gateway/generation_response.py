"""Runs one generation and writes its answer: as events while it grows, or as one body at its end."""

from __future__ import annotations

import asyncio
import time

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.common.errors import OctavoError
from octavo.gateway import metrics
from octavo.gateway.choice_output import Delta
from octavo.gateway.event_writer import EventWriter
from octavo.gateway.generation import Generation
from octavo.gateway.generation_job import GenerationJob
from octavo.gateway.generation_run import GenerationRun
from octavo.gateway.http_errors import report_of
from octavo.gateway.worker_groups import WorkerGroups

log = structlog.get_logger()

CLIENT_GONE_STATUS = 499
"""Logged for a client that left; nobody receives it."""


class GenerationResponse(Response):
    """Generates when it is called, so that whatever ends the call also ends the generation.

    Headers are sent with the first news from the scheduler: a request that it refuses still gets its own status.
    When the client leaves, the generation is aborted at once.
    """

    def __init__(self, client: WorkerGroups, job: GenerationJob) -> None:
        super().__init__()
        self._client, self._job = client, job
        self._run = GenerationRun(job)
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Submitted before any task is made: each is a turn of the event loop later, in which the work of all requests
        # that have come at once would go first.
        with await self._submit() as generation, metrics.OPEN_GENERATIONS.track_inprogress():
            await self._answer_or_abort(generation, scope, receive, send)

    async def _submit(self) -> Generation:
        job = self._job
        await job.account.charge_prompt(sum(len(prompt.token_ids) for prompt in job.prompts))
        prompts = [job.account.own(prompt) for prompt in job.prompts]
        generation = self._client.submit(
            job.request_id, prompts, job.cache_salt, job.seconds_left(), job.account.traceparent
        )
        self._run.submitted_s = time.perf_counter()
        return generation

    async def _answer_or_abort(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        self._send_body = state.get("send_body", send)
        self._write_chunk = state.get("write_chunk", lambda chunk: False)
        answer = asyncio.ensure_future(self._answer(generation, send))
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

    async def _answer(self, generation: Generation, send: Send) -> None:
        job = self._job
        unfinished = "error"
        try:
            if job.is_stream:
                await self._stream(generation, send)
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

    async def _stream(self, generation: Generation, send: Send) -> None:
        job, run, answer_format = self._job, self._run, self._job.answer_format
        writer = EventWriter(run, generation, answer_format, self._send_body, self._write_chunk)
        try:
            async for events in generation:
                chunk = b""
                if not self._has_begun:
                    await self._begin(send, b"text/event-stream; charset=utf-8")
                    chunk = answer_format.start(run.usage(generation))
                output = writer.chunk(events)
                if chunk := chunk + output:
                    await writer.send(chunk)
                if output and not run.has_shown:
                    run.observe_first_output()
                    generation.write_with(writer.write, job.max_unread)
            run.check_all_ended()
            end = await answer_format.end(run.usage(generation))
        except Exception as error:
            if not self._has_begun or isinstance(error, OSError):
                raise
            if not isinstance(error, OctavoError):
                log.exception("stream failed", request_id=job.request_id)
            end = answer_format.failure(report_of(error))
        await writer.send(end, more=False)

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


def _joined(deltas: list[Delta]) -> Delta:
    tokens = [token for delta in deltas for token in delta.tokens]
    return Delta("".join(d.text for d in deltas), tokens, deltas[-1].finish_reason, deltas[-1].stop_reason)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
