"""All worker groups of a server side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
from rich.table import Table

from octavo.cli.activity_view import read_activity
from octavo.cli.pool_view import PoolFigures, read_figures
from octavo.common.links import Address, TlsFiles


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group at one moment. What a service that does not answer would tell is None."""

    pool_id: str
    figures: PoolFigures | None
    queues: dict[str, int] | None
    away: list[str]
    """Services that do not answer."""


async def read_groups(groups: Mapping[str, Sequence[str]], tls: TlsFiles | None = None) -> list[GroupView]:
    """`groups`: pool |-> gRPC addresses of its KV manager and its scheduler."""
    return await asyncio.gather(
        *(_read_group(pool_id, kvmanager, scheduler, tls) for pool_id, (kvmanager, scheduler) in groups.items())
    )


async def _read_group(pool_id: str, kvmanager: str, scheduler: str, tls: TlsFiles | None) -> GroupView:
    figures, activity = await asyncio.gather(
        read_figures(Address.parse(kvmanager), pool_id, tls),
        read_activity(Address.parse(scheduler), tls),
        return_exceptions=True,
    )
    away = []
    for service, told in (("KV manager", figures), ("scheduler", activity)):
        if isinstance(told, (grpc.aio.AioRpcError, OSError)):
            away.append(service)
        elif isinstance(told, BaseException):
            raise told
    return GroupView(
        pool_id,
        None if isinstance(figures, BaseException) else figures,
        None if isinstance(activity, BaseException) else activity.queues,
        away,
    )


def groups_table(groups: Sequence[GroupView], shown: str) -> Table:
    """A row a group; the one that is `shown` below is marked."""
    table = Table(title=f"{len(groups)} groups; another one: octavo inspect --pool NAME", title_justify="left")
    table.add_column("group", no_wrap=True)
    for name in ("running", "waiting", "blocks in use", "prefix hits"):
        table.add_column(name, justify="right", no_wrap=True)
    if any(group.away for group in groups):
        table.add_column("away", style="red")
    for group in groups:
        name = f"▸ {group.pool_id}" if group.pool_id == shown else f"  {group.pool_id}"
        running = waiting = in_use = hits = "-"
        if (queues := group.queues) is not None:
            running = f"{queues['running']} of {queues['slots']}"
            waiting = str(queues["waiting"] + queues["waiting_for_shared_prefix"])
        if (figures := group.figures) is not None:
            in_use = f"{figures.counts['active'] / figures.num_blocks:.0%} of {figures.num_blocks}"
            if figures.num_lookup_tokens:
                hits = f"{figures.num_hit_tokens / figures.num_lookup_tokens:.0%} of {figures.num_lookup_tokens}"
        table.add_row(name, running, waiting, in_use, hits, *([", ".join(group.away)] if group.away else []))
    return table
