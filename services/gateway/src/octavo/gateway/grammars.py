"""Owns the processes in which grammars are tried before a request is taken, and the outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from octavo.common.errors import NotReadyError, QueueFullError
from octavo.gateway.http_errors import FieldError

log = structlog.get_logger()

MAX_OUTCOMES = 256
MAX_WAITING = 64
START_TIMEOUT_S = 60.0
_LINE_LIMIT = 16 * 2**20


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What a request asks for."""

    param: str
    """Name of the field, for errors."""
    kind: str
    """json, regex, choice or grammar."""
    value: Any
    parts: tuple[GrammarSource, ...] = ()
    """What other fields gave of it: a fault is named by the part that has it."""


class GrammarChecker:
    """Turns sources into grammars that workers can follow.

    One is tried for `timeout_s` at most, in one of `num_processes` processes, which start with the first grammars.
    """

    def __init__(self, tokenizer: Path, num_processes: int, timeout_s: float) -> None:
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(num_processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._num_waiting = 0
        self._outcomes: OrderedDict[bytes, dict[str, str]] = OrderedDict()

    async def grammar(self, source: GrammarSource) -> str:
        """Raises FieldError for one that is wrong or takes too much, QueueFullError if too many are to be tried."""
        request = orjson.dumps({"kind": source.kind, "value": source.value})
        outcome = self._outcomes.get(request)
        if outcome is None:
            outcome = await self._try(request)
            if outcome is None:
                message = f"compiling it takes more than {self._timeout_s:g} s, or too much memory"
                raise FieldError(source.param, f"{source.param}: {message}", "invalid_grammar")
            self._outcomes[request] = outcome
            if len(self._outcomes) > MAX_OUTCOMES:
                self._outcomes.popitem(last=False)
        if "error" in outcome:
            for part in source.parts:
                await self.grammar(part)
            raise FieldError(source.param, f"{source.param}: {outcome['error']}", "invalid_grammar")
        return outcome["grammar"]

    async def close(self) -> None:
        """End the processes."""
        for process in self._idle:
            await _end(process)
        self._idle.clear()

    async def _try(self, request: bytes) -> dict[str, str] | None:
        """None: it took too much."""
        if self._num_waiting >= MAX_WAITING:
            raise QueueFullError("too many grammars are being compiled; try again later")
        self._num_waiting += 1
        try:
            async with self._turns:
                return await self._run(self._take_idle() or await self._start(), request)
        finally:
            self._num_waiting -= 1

    def _take_idle(self) -> asyncio.subprocess.Process | None:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "octavo.gateway.grammar_process",
            str(self._tokenizer),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LINE_LIMIT,
            env={**os.environ, "MALLOC_ARENA_MAX": "2", "RAYON_NUM_THREADS": "1"},
        )
        try:
            if await _line(process, START_TIMEOUT_S) is not None:
                return process
        except BaseException:
            await _end(process)
            raise
        await _end(process)
        raise NotReadyError("grammars cannot be compiled with this model's tokenizer")

    async def _run(self, process: asyncio.subprocess.Process, request: bytes) -> dict[str, str] | None:
        assert process.stdin is not None
        answer = None
        try:
            process.stdin.write(request + b"\n")
            answer = await _line(process, self._timeout_s)
        finally:
            if answer is None:
                await _end(process)
            else:
                self._idle.append(process)
        if answer is None:
            log.info("grammar took too much", timeout_s=self._timeout_s, num_bytes=len(request))
            return None
        outcome: dict[str, str] = orjson.loads(answer)
        return outcome


async def _line(process: asyncio.subprocess.Process, timeout_s: float) -> bytes | None:
    """The next line of its output; None if it ends first or takes too long."""
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            return await process.stdout.readline() or None
    return None


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
