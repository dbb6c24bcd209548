"""`octavo serve`: prepares the model, runs the four services, and stops them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import uvloop

from octavo.cli.console import Screen
from octavo.cli.models import PreparedModel
from octavo.cli.readiness import wait_until_ready
from octavo.cli.run_files import RunningServer, registered
from octavo.cli.serve_options import ServeOptions
from octavo.cli.service_processes import (
    admin_address,
    members,
    members_file,
    metrics_dir,
    pool_names,
    service_name,
    service_processes,
)
from octavo.cli.supervisor import ServiceGaveUpError, Supervisor
from octavo.common import logs
from octavo.common.links import Address
from octavo.common.runtime import Stop

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_KILLED = 130

_MAX_SOCKET_PATH = 100
"""A little less than what the kernel takes for the path of a Unix socket (108 bytes)."""


class CannotListenError(Exception):
    """The gateway could not listen where it was told to."""


def check_port(host: str, port: int) -> None:
    """Raises CannotListenError, whose message says what to do, if nothing can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        way_out = "--host 127.0.0.1 is this machine alone, --host 0.0.0.0 all its addresses"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            another = port + 1 if 1023 < port < 65535 else 8000
            way_out = f"Choose another port, for example octavo serve --port {another} (or make serve PORT={another})"
        raise CannotListenError(f"cannot listen on {host}:{port}: {error.strerror or error}. {way_out}") from error


def serve_processes(options: ServeOptions, model: PreparedModel, screen: Screen) -> int:
    """Run the services as child processes until SIGINT, SIGTERM or SIGHUP. Returns the exit status."""
    with _run_dir() as run_dir, ExitStack() as opened:
        metrics_dir(run_dir).mkdir()
        known = members(options, run_dir)
        members_file(run_dir).write_text(json.dumps([asdict(member) for member in known]), encoding="utf-8")
        groups = {
            pool: [admin_address(run_dir, service_name(service, pool)) for service in ("kvmanager", "scheduler")]
            for pool in pool_names(options)
        }
        kvmanager, scheduler = next(iter(groups.values()))
        several = groups if options.groups > 1 else {}
        try:
            opened.enter_context(registered(RunningServer(os.getpid(), options.url, kvmanager, scheduler, several)))
        except OSError as error:
            screen.say(
                f"octavo inspect will find this server by --address and --scheduler only: {error}", style="yellow"
            )
        return asyncio.run(_supervise(options, model, run_dir, screen))


def serve_in_one_process(options: ServeOptions, model: PreparedModel, screen: Screen) -> int:
    """Run the services in this process until SIGINT, SIGTERM or SIGHUP. Returns the exit status."""
    return uvloop.run(_serve_local(options, model, screen))


async def _serve_local(options: ServeOptions, model: PreparedModel, screen: Screen) -> int:
    from octavo.cli.local_cluster import LocalCluster

    logs.configure("local", options.log_level, "console")
    cluster = LocalCluster(options, model)
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.request)
    serving = asyncio.create_task(cluster.serve(stop))
    waiting = asyncio.create_task(cluster.tell_progress(screen.progress))
    with screen.status_line():
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if waiting.done():
        screen.say(greeting_text(options.url, model.name))
    waiting.cancel()
    try:
        await serving
    except Exception as error:
        screen.say(f"{type(error).__name__}: {error}", style="red")
        return EXIT_FAILED
    screen.say("stopped")
    return EXIT_OK


async def _supervise(options: ServeOptions, model: PreparedModel, run_dir: Path, screen: Screen) -> int:
    supervisor = Supervisor(
        service_processes(options, model, run_dir),
        on_line=screen.service_line,
        on_event=lambda text: screen.say(text, style="bold red"),
    )
    stop_requested, kill_requested = _watch_signals()
    running = asyncio.create_task(supervisor.run())
    greeting = asyncio.create_task(_greet_when_ready(options, model, run_dir, supervisor, screen))
    stopping = asyncio.create_task(stop_requested.wait())
    try:
        with screen.status_line():
            await asyncio.wait({running, greeting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if greeting.done():
            greeting.result()
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        greeting.cancel()
        failure = running.exception() if running.done() else None
        if failure is None:
            screen.say("stopping (Ctrl-C again kills)")
        killed = await _stop(supervisor, kill_requested)
        running.cancel()
        with suppress(asyncio.CancelledError, ServiceGaveUpError):
            await running
    except BaseException:
        supervisor.kill()
        raise
    if isinstance(failure, ServiceGaveUpError):
        screen.say(str(failure), style="red")
        return EXIT_FAILED
    if failure is not None:
        raise failure
    screen.say("killed" if killed else "stopped")
    return EXIT_KILLED if killed else EXIT_OK


async def _stop(supervisor: Supervisor, kill_requested: asyncio.Event) -> bool:
    """Stop in order, or kill as soon as that is asked for. Returns whether it was."""
    stop = asyncio.create_task(supervisor.stop())
    kill = asyncio.create_task(kill_requested.wait())
    await asyncio.wait({stop, kill}, return_when=asyncio.FIRST_COMPLETED)
    if kill.done():
        supervisor.kill()
    kill.cancel()
    await stop
    return kill_requested.is_set()


def _watch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Events of the first and of the second signal that asks to stop."""
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return first, second


async def _greet_when_ready(
    options: ServeOptions, model: PreparedModel, run_dir: Path, supervisor: Supervisor, screen: Screen
) -> None:
    await wait_until_ready(
        options.url,
        Address.parse(admin_address(run_dir, service_name("worker", pool_names(options)[0]))),
        screen.progress,
    )
    supervisor.mark_ready()
    screen.say(greeting_text(options.url, model.name))


def greeting_text(url: str, model_name: str) -> str:
    """What a person needs once the server is up. The curl command can be pasted into a shell."""
    body = json.dumps({"model": model_name, "messages": [{"role": "user", "content": "Say hello."}]})
    data = shlex.quote(body)
    return "\n".join(
        [
            f"Octavo serves {model_name} at {url}",
            f"  try      curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d {data}",
            f"  chat     {_this_command()} chat --url {url}",
            f"  page     {url}/ui",
            f"  docs     {url}/docs",
            f"  metrics  {url}/metrics",
            "  stop     Ctrl-C",
        ]
    )


def _this_command() -> str:
    """How a shell finds this program: by its name, if it is the one on the search path, else where it lies."""
    program = Path(sys.argv[0]).absolute()
    return program.name if shutil.which(program.name) == str(program) else shlex.quote(str(program))


@contextmanager
def _run_dir() -> Iterator[Path]:
    """A new folder for sockets that only this user can enter."""
    folder = tempfile.mkdtemp(prefix="octavo-")
    if len(folder) + len("/kvmanager-64.grpc.sock") > _MAX_SOCKET_PATH:
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="octavo-", dir="/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["CannotListenError", "check_port", "greeting_text", "serve_in_one_process", "serve_processes"]
