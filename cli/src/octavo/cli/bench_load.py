"""Sends the requests of a benchmark and records when their tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from octavo.cli.api_client import STREAM_END, ServerError, key_headers, parse_event, refusal, trusts_proxy
from octavo.cli.bench_report import RequestRecord
from octavo.cli.bench_workload import BenchRequest

_CONNECT_TIMEOUT_S = 10.0


class Load:
    """Drives one server with one workload.

    A request that has a due time is timed from it, whether or not there was room for it then: a client would wait too.
    """

    def __init__(self, url: str, model: str, concurrency: int | None, timeout_s: float) -> None:
        self._url = url
        self._model = model
        self._room = asyncio.Semaphore(concurrency) if concurrency is not None else None
        self._timeout_s = timeout_s

    async def run(self, requests: Sequence[BenchRequest], on_done: Callable[[RequestRecord], None]) -> None:
        """Send all requests, each when it is due, and return when the last has ended."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        async with httpx.AsyncClient(
            limits=limits, timeout=timeout, trust_env=trusts_proxy(self._url), headers=key_headers()
        ) as client:
            started_s = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    due_s = None
                    if request.due_s is not None:
                        due_s = started_s + request.due_s
                        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                    if self._room is not None and request.due_s is None:
                        await self._room.acquire()
                    tasks.create_task(self._send_in_turn(client, request, due_s, on_done))

    async def _send_in_turn(
        self,
        client: httpx.AsyncClient,
        request: BenchRequest,
        due_s: float | None,
        on_done: Callable[[RequestRecord], None],
    ) -> None:
        if self._room is not None and due_s is not None:
            await self._room.acquire()
        try:
            record = RequestRecord(start_s=due_s if due_s is not None else time.perf_counter())
            await self._send(client, request, record)
        finally:
            if self._room is not None:
                self._room.release()
        on_done(record)

    async def _send(self, client: httpx.AsyncClient, request: BenchRequest, record: RequestRecord) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(client, request, record)
        except TimeoutError:
            record.error = "timeout"
        except ServerError as error:
            record.error, record.error_detail = "error event", str(error)
        except httpx.TransportError as error:
            record.error, record.error_detail = type(error).__name__, str(error)
        record.end_s = record.end_s or time.perf_counter()

    async def _stream(self, client: httpx.AsyncClient, request: BenchRequest, record: RequestRecord) -> None:
        body = {
            "model": self._model,
            "prompt": request.prompt_ids,
            "max_tokens": request.output_len,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as response:
            if not response.is_success:
                await response.aread()
                record.error, record.error_detail = f"HTTP {response.status_code}", str(refusal(response))
                return
            async for line in response.aiter_lines():
                event = parse_event(line)
                if event is STREAM_END:
                    return
                if isinstance(event, dict):
                    _note(event, record)
        record.error = "stream broke off"


def _note(event: dict[str, Any], record: RequestRecord) -> None:
    now_s = time.perf_counter()
    num_tokens = sum(_num_tokens(choice) for choice in event.get("choices", ()))
    if num_tokens:
        record.add_tokens(now_s, num_tokens)
    if usage := event.get("usage"):
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]


def _num_tokens(choice: dict[str, Any]) -> int:
    """Tokens in one chunk; of a server that does not list their ids, at least one where there is text."""
    token_ids = choice.get("token_ids")
    return len(token_ids) if token_ids is not None else int(bool(choice.get("text")))
