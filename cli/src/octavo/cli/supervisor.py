"""Starts child processes, starts them again when they die, and stops them in order.

Children run in process groups of their own, so that Ctrl-C in a terminal reaches the supervisor alone, and get
SIGTERM from the kernel when the supervisor dies without having stopped them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from octavo.cli.service_processes import ServiceProcess

_DIE_WITH_PARENT = (sys.executable, "-S", "-E", str(Path(__file__).with_name("die_with_parent.py")))
_LINES_KEPT = 20
_BAD_SETTINGS = 2
"""Exit status of a service that refuses its settings: starting it again would change nothing."""
_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead child is started again."""

    first_delay_s: float = 0.1
    """Doubled with each quick death."""
    max_delay_s: float = 10.0
    quick_s: float = 10.0
    """A child that lives longer than this has recovered, and its deaths are counted anew."""
    max_quick_deaths: int = 5
    """After so many in a row the supervisor gives up."""
    max_deaths_before_ready: int = 2
    """The same while the services have never been ready yet: then it is likely a mistake that stays."""


class ServiceGaveUpError(Exception):
    """A child died too often. The message holds the last lines that it wrote."""


@dataclass
class _Child:
    spec: ServiceProcess
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LINES_KEPT))
    quick_deaths: int = 0
    task: asyncio.Task[None] | None = None


class Supervisor:
    """Owns the child processes.

    `on_line(service, line)` gets each line that a child writes, `on_event(text)` what the supervisor does about it.
    """

    def __init__(
        self,
        processes: Sequence[ServiceProcess],
        on_line: Callable[[str, str], None],
        on_event: Callable[[str], None],
        policy: RestartPolicy = RestartPolicy(),
    ) -> None:
        self._children = [_Child(spec) for spec in processes]
        self._on_line = on_line
        self._on_event = on_event
        self._policy = policy
        self._stopping = asyncio.Event()
        self._was_ready = False

    async def run(self) -> None:
        """Start all children in order and keep them running until `stop`.

        Raises ServiceGaveUpError if one dies too often; the others still run then.
        """
        for child in self._children:
            await self._start(child)
        tasks = [asyncio.create_task(self._keep_running(child)) for child in self._children]
        for child, task in zip(self._children, tasks, strict=True):
            child.task = task
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Send SIGTERM in the opposite order of the start, each child after the one before it has ended."""
        self._stopping.set()
        for child in reversed(self._children):
            await self._stop_child(child)

    def kill(self) -> None:
        """SIGKILL to every child, at once."""
        self._stopping.set()
        for child in self._children:
            _kill_group(child)

    def mark_ready(self) -> None:
        """Say that the services work together: from here on a death counts as an accident."""
        self._was_ready = True

    async def _start(self, child: _Child) -> None:
        child.process = await asyncio.create_subprocess_exec(
            *_DIE_WITH_PARENT,
            str(os.getpid()),
            *child.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PYTHONUNBUFFERED": "1", **child.spec.defaults, **os.environ, **child.spec.settings},
            process_group=0,
            limit=_MAX_LINE_BYTES,
        )
        if self._stopping.is_set():  # `stop` came between the fork and here, and did not see this process
            _kill_group(child)

    async def _keep_running(self, child: _Child) -> None:
        while True:
            started = time.monotonic()
            status = await self._watch(child)
            if self._stopping.is_set():
                return
            lived_s = time.monotonic() - started
            child.quick_deaths = child.quick_deaths + 1 if lived_s < self._policy.quick_s else 1
            self._give_up_if_hopeless(child, status)
            delay_s = min(self._policy.first_delay_s * 2 ** (child.quick_deaths - 1), self._policy.max_delay_s)
            self._on_event(f"{child.spec.name} {_describe(status)}; starting it again in {delay_s:.1f} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
                return
            await self._start(child)

    async def _watch(self, child: _Child) -> int:
        """Pass on what the child writes until it ends. Returns its exit status, negative for a signal."""
        process = child.process
        assert process is not None and process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                line = b"(a line that is too long was dropped)"
            if not line:
                return await process.wait()
            text = line.decode(errors="replace").rstrip("\r\n")
            child.last_lines.append(text)
            self._on_line(child.spec.name, text)

    def _give_up_if_hopeless(self, child: _Child, status: int) -> None:
        allowed = self._policy.max_quick_deaths if self._was_ready else self._policy.max_deaths_before_ready
        if child.quick_deaths < allowed and status != _BAD_SETTINGS:
            return
        lines = "\n".join(f"    {line}" for line in child.last_lines) or "    (it wrote nothing)"
        raise ServiceGaveUpError(
            f"{child.spec.name} {_describe(status)}, {_times(child.quick_deaths)}. Its last lines:\n{lines}"
        )

    async def _stop_child(self, child: _Child) -> None:
        if child.process is None or not _is_alive(child):
            return
        with suppress(ProcessLookupError):
            child.process.terminate()
        try:
            async with asyncio.timeout(child.spec.stop_within_s):
                await child.process.wait()
        except TimeoutError:
            self._on_event(f"{child.spec.name} did not stop within {child.spec.stop_within_s:.1f} s and was killed")
            _kill_group(child)
            await child.process.wait()


def _is_alive(child: _Child) -> bool:
    return child.process is not None and child.process.returncode is None


def _kill_group(child: _Child) -> None:
    """SIGKILL to the child and whatever it has started."""
    if child.process is not None and _is_alive(child):
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times in a row"
