"""`octavo inspect`: what a running server holds and does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from octavo.cli.activity_view import ActivityView, read_activity, read_explanation
from octavo.cli.groups_view import GroupView, groups_table, read_groups
from octavo.cli.inspect_page import pool_page
from octavo.cli.pool_view import STATES, PoolView, read_pool
from octavo.cli.run_files import RunningServer, running_servers
from octavo.cli.why_page import why_page
from octavo.common.links import Address, TlsFiles

EXIT_OK = 0
EXIT_FAILED = 1

_NO_SERVER = (
    "no running `octavo serve` was found. Start one with octavo serve (one with --local cannot be looked into), "
    "or give {option}"
)
_NO_SCHEDULER = "Queues, sequences and steps: give the scheduler's address too, --scheduler grpc://HOST:PORT"


class CannotInspectError(Exception):
    """There is nothing to look at. The message says what to do."""


_ADDRESS_OPTION = "the KV manager's gRPC address: --address grpc://HOST:PORT"


@dataclass(frozen=True, slots=True)
class InspectSettings:
    """Addresses as they were given; None is found from the server at `url`, or from the one that was started last."""

    url: str | None = None
    kvmanager: str | None = None
    scheduler: str | None = None
    pool_id: str = ""
    tls: TlsFiles | None = None
    as_json: bool = False


def run_inspect(settings: InspectSettings) -> int:
    """Show a server once. Returns the exit status: 0, or 1 if it cannot be read or its ledger does not add up."""

    def show() -> int:
        seen = asyncio.run(_read(settings))
        if settings.as_json:
            print(json.dumps(_as_json(seen)))
        else:
            console = Console()
            console.print(_page(seen, console.width))
        return EXIT_FAILED if seen.pool.violations else EXIT_OK

    return _said(show)


def watch(settings: InspectSettings, interval_s: float) -> int:
    """Show a server again and again until Ctrl-C."""

    def show() -> int:
        console = Console()
        seen = asyncio.run(_read(settings))
        with Live(_page(seen, console.width), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(_page(asyncio.run(_read(settings)), console.width), refresh=True)

    try:
        return _said(show)
    except KeyboardInterrupt:
        return EXIT_OK


def run_why(settings: InspectSettings, request_id: str) -> int:
    """Say why a request took as long as it did."""

    def show() -> int:
        explanation = asyncio.run(_explanation(settings, request_id))
        if settings.as_json:
            print(json.dumps(explanation))
        else:
            Console().print(why_page(explanation))
        return EXIT_OK

    return _said(show)


async def _explanation(settings: InspectSettings, request_id: str) -> dict[str, Any]:
    """From the first scheduler that knows the request, by its own id or by its answer's."""
    from octavo.gateway.response_ids import ids_of

    failure: grpc.aio.AioRpcError | None = None
    for address, known_as in product(_schedulers(settings), ids_of(request_id)):
        try:
            return await read_explanation(Address.parse(address), known_as, settings.tls)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                failure = error
    if failure is not None:
        raise failure
    message = "is unknown, or ended so long ago that it was forgotten"
    raise CannotInspectError(f"request {request_id!r} {message}")


def _schedulers(settings: InspectSettings) -> list[str]:
    """The one that is named, that of the pool that is asked for, or those of all groups."""
    option = "the scheduler's gRPC address: --scheduler grpc://HOST:PORT"
    if settings.scheduler is not None:
        return [settings.scheduler]
    groups = {} if settings.pool_id else _server(settings, option).groups
    return [scheduler for _, scheduler in groups.values()] or [_found(settings, "scheduler", option)]


def _said(show: Callable[[], int]) -> int:
    """Run it; what cannot be done is said, and ends with status 1."""
    try:
        return show()
    except grpc.aio.AioRpcError as error:
        message = f"the server cannot be asked: {error.details()}. Does it run, and is the address that of gRPC?"
    except BrokenPipeError:
        raise  # whoever reads the output has seen enough
    except (CannotInspectError, ValueError, OSError) as error:
        message = str(error)
    Console(stderr=True).print(Text(f"octavo inspect: {message}", style="red"), soft_wrap=True)
    return EXIT_FAILED


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the services told."""

    pool: PoolView
    activity: ActivityView | None
    groups: list[GroupView]
    """Of a server that has several."""
    note: str = ""
    """Why there is no activity."""


async def _read(settings: InspectSettings) -> _Seen:
    if settings.tls is not None:
        settings.tls.check()
    kvmanager = settings.kvmanager or _found(settings, "kvmanager", _ADDRESS_OPTION)
    pool = await read_pool(Address.parse(kvmanager), settings.pool_id, settings.tls)
    if settings.scheduler is not None:
        return _Seen(pool, await read_activity(Address.parse(settings.scheduler), settings.tls), [])
    if settings.kvmanager is not None:
        return _Seen(pool, None, [], _NO_SCHEDULER)
    groups = await read_groups(_server(settings, _ADDRESS_OPTION).groups, settings.tls)
    try:
        address = Address.parse(_found(settings, "scheduler", "--scheduler grpc://HOST:PORT"))
        return _Seen(pool, await read_activity(address, settings.tls), groups)
    except grpc.aio.AioRpcError as error:
        return _Seen(pool, None, groups, f"the scheduler does not answer: {error.details()}")


def _server(settings: InspectSettings, option: str) -> RunningServer:
    servers = running_servers()
    if not servers:
        raise CannotInspectError(_NO_SERVER.format(option=option))
    if settings.url is None:
        return servers[0]
    for server in servers:
        if server.url == settings.url.rstrip("/"):
            return server
    found = ", ".join(server.url for server in servers)
    raise CannotInspectError(f"no server that was started here is at {settings.url}; there is {found}")


def _found(settings: InspectSettings, service: str, option: str) -> str:
    """Of the group of the pool that is asked for, or of the first one."""
    server, pool_id = _server(settings, option), settings.pool_id
    groups = server.groups
    if not pool_id or not groups:
        return str(getattr(server, service))
    if pool_id not in groups:
        raise CannotInspectError(f"the server has no pool {pool_id!r}; it has {', '.join(groups)}")
    return groups[pool_id][("kvmanager", "scheduler").index(service)]


def _page(seen: _Seen, width: int) -> RenderableType:
    parts: list[RenderableType] = [pool_page(seen.pool, seen.activity, width)]
    if seen.groups:
        parts.insert(0, groups_table(seen.groups, seen.pool.pool_id))
    if seen.note:
        parts.append(Text(seen.note, style="dim"))
    return Group(*parts)


def _as_json(seen: _Seen) -> dict[str, object]:
    view = seen.pool
    return {
        "pool_id": view.pool_id,
        "num_blocks": view.num_blocks,
        "block_size": view.block_size,
        "counts": view.counts,
        "states": [STATES[state] for state in view.states],
        "ref_counts": view.ref_counts,
        "tables": [asdict(table) for table in view.tables],
        "prefixes": [asdict(node) for node in view.prefixes],
        "violations": view.violations,
        "activity": None if seen.activity is None else asdict(seen.activity),
        "groups": [asdict(group) for group in seen.groups],
    }
