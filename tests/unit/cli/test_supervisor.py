"""Child processes are started, watched, started again, and stopped in order. The children are small scripts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from octavo.cli.service_processes import ServiceProcess
from octavo.cli.supervisor import RestartPolicy, ServiceGaveUpError, Supervisor

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02, max_quick_deaths=3, max_deaths_before_ready=2)

STOPS_POLITELY = """
import signal, sys, time
def stop(number, frame):
    with open({log!r}, "a") as log:
        log.write({name!r} + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(60)
"""
IGNORES_SIGTERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


def child(name: str, script: str, stop_within_s: float = 5.0) -> ServiceProcess:
    return ServiceProcess(name, (sys.executable, "-c", script), {}, stop_within_s=stop_within_s)


class Watched:
    """A supervisor with everything that it tells."""

    def __init__(self, *children: ServiceProcess, policy: RestartPolicy = QUICK) -> None:
        self.lines: list[tuple[str, str]] = []
        self.events: list[str] = []
        self.supervisor = Supervisor(
            children, lambda service, line: self.lines.append((service, line)), self.events.append, policy
        )
        self.running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watched:
        self.running = asyncio.create_task(self.supervisor.run())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.supervisor.kill()
        assert self.running is not None
        self.running.cancel()
        with suppress(asyncio.CancelledError, ServiceGaveUpError):
            await self.running
        await self.supervisor.stop()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 (what it waits for has no event)
                await asyncio.sleep(0.01)

    async def until_up(self, count: int = 1) -> None:
        await self.until(lambda: sum(line == "up" for _, line in self.lines) >= count)


async def test_children_stop_one_after_the_other_the_last_started_first(tmp_path: Path) -> None:
    log = tmp_path / "stopped"
    names = ["kvmanager", "worker", "scheduler", "gateway"]
    children = [child(name, STOPS_POLITELY.format(log=str(log), name=name)) for name in names]
    async with Watched(*children) as watched:
        await watched.until_up(4)
        await watched.supervisor.stop()
        assert log.read_text().split() == ["gateway", "scheduler", "worker", "kvmanager"]
        assert watched.running is not None
        await watched.running  # ends by itself, without an error
        assert watched.events == []


async def test_what_a_child_writes_is_passed_on_under_its_name() -> None:
    script = "import sys, time; print('to stdout'); print('to stderr', file=sys.stderr); time.sleep(60)"
    async with Watched(child("worker", script)) as watched:
        await watched.until(lambda: len(watched.lines) == 2)
        assert watched.lines == [("worker", "to stdout"), ("worker", "to stderr")]


async def test_a_child_that_dies_is_started_again_and_the_reason_told(tmp_path: Path) -> None:
    flag = tmp_path / "died-once"
    script = f"""
        import pathlib, sys, time
        flag = pathlib.Path({str(flag)!r})
        if not flag.exists():
            flag.touch()
            sys.exit(3)
        print("up", flush=True)
        time.sleep(60)
    """
    async with Watched(child("worker", textwrap.dedent(script))) as watched:
        await watched.until_up()
        assert watched.events == ["worker ended with exit status 3; starting it again in 0.0 s"]


async def test_a_killed_child_is_told_by_the_signals_name() -> None:
    script = "import os, signal, time; print(os.getpid(), flush=True); time.sleep(60)"
    async with Watched(child("worker", script)) as watched:
        await watched.until(lambda: len(watched.lines) == 1)
        os.kill(int(watched.lines[0][1]), signal.SIGKILL)
        await watched.until(lambda: len(watched.lines) == 2)
        assert watched.events == ["worker was killed by SIGKILL; starting it again in 0.0 s"]


async def test_a_child_that_keeps_dying_is_given_up_with_its_last_lines() -> None:
    async with Watched(child("worker", "import sys; print('no such model'); sys.exit(1)")) as watched:
        watched.supervisor.mark_ready()
        assert watched.running is not None
        with pytest.raises(ServiceGaveUpError, match=r"exit status 1, 3 times in a row.*\n    no such model"):
            await watched.running
        assert len(watched.events) == 2


async def test_before_all_were_ready_fewer_deaths_are_enough() -> None:
    async with Watched(child("worker", "raise SystemExit(1)")) as watched:
        assert watched.running is not None
        with pytest.raises(ServiceGaveUpError, match="2 times in a row"):
            await watched.running


async def test_refused_settings_are_not_tried_again() -> None:
    async with Watched(child("gateway", "print('port: not a number'); raise SystemExit(2)")) as watched:
        assert watched.running is not None
        with pytest.raises(ServiceGaveUpError, match="exit status 2, once"):
            await watched.running
        assert watched.events == []


async def test_the_delay_doubles_up_to_a_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.1, max_delay_s=0.3, max_deaths_before_ready=4)
    async with Watched(child("worker", "raise SystemExit(1)"), policy=policy) as watched:
        assert watched.running is not None
        with pytest.raises(ServiceGaveUpError):
            await watched.running
        assert [event.rpartition(" in ")[2] for event in watched.events] == ["0.1 s", "0.2 s", "0.3 s"]


async def test_a_child_that_does_not_stop_is_killed_in_time() -> None:
    async with Watched(child("worker", IGNORES_SIGTERM, stop_within_s=0.1)) as watched:
        await watched.until_up()
        started = time.monotonic()
        await watched.supervisor.stop()
        assert time.monotonic() - started < 3
        assert watched.events == ["worker did not stop within 0.1 s and was killed"]


async def test_stop_does_not_wait_for_a_restart_that_is_due() -> None:
    policy = RestartPolicy(first_delay_s=60, max_delay_s=60)
    async with Watched(child("worker", "raise SystemExit(1)"), policy=policy) as watched:
        await watched.until(lambda: watched.events != [])
        await watched.supervisor.stop()
        assert watched.running is not None
        async with asyncio.timeout(5):
            await watched.running
        assert len(watched.events) == 1


async def test_a_child_is_in_a_process_group_of_its_own() -> None:
    script = "import os, time; print(os.getpid(), os.getpgid(0), flush=True); time.sleep(60)"
    async with Watched(child("worker", script)) as watched:
        await watched.until(lambda: len(watched.lines) == 1)
        process_id, group_id = watched.lines[0][1].split()
        assert process_id == group_id != str(os.getpgid(0))


async def test_settings_are_stronger_than_the_environment_and_defaults_weaker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTING", "DEFAULT"):
        monkeypatch.setenv(f"OCTAVO_TEST_{name}", "environment")
    script = "import os; print(*(os.environ['OCTAVO_TEST_' + name] for name in ('SETTING', 'DEFAULT', 'OTHER')))"
    defaults = {"OCTAVO_TEST_DEFAULT": "default", "OCTAVO_TEST_OTHER": "default"}
    spec = ServiceProcess("worker", (sys.executable, "-c", script), {"OCTAVO_TEST_SETTING": "setting"}, defaults)
    async with Watched(spec) as watched:
        await watched.until(lambda: watched.lines != [])
        assert watched.lines[0][1] == "setting environment default"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's notice of a parent's death is Linux's")
def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "stopped"
    supervise = f"""
        import asyncio, sys
        from octavo.cli.service_processes import ServiceProcess
        from octavo.cli.supervisor import Supervisor
        script = {STOPS_POLITELY.format(log=str(log), name="worker")!r}
        process = ServiceProcess("worker", (sys.executable, "-c", script), {{}})
        asyncio.run(Supervisor([process], lambda *line: print(*line, flush=True), print).run())
    """
    command = [sys.executable, "-c", textwrap.dedent(supervise)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "worker up\n"
        supervisor.kill()
    deadline = time.monotonic() + 10
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert log.read_text() == "worker\n"
