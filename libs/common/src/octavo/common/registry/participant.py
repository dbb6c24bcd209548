"""A service's part in the registry: its own registration, and the way to the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import structlog

from octavo.common.errors import NotReadyError
from octavo.common.links import Address
from octavo.common.registry.members import Member
from octavo.common.registry.membership import Membership
from octavo.common.registry.open import open_registry
from octavo.common.registry.roster import Roster
from octavo.common.registry.static import StaticRegistry
from octavo.common.roles import Role
from octavo.common.runtime import Stop
from octavo.common.service_config import ServiceConfig

log = structlog.get_logger()

_ALL_INTERFACES = ("0.0.0.0", "[::]")
_END_TIMEOUT_S = 3.0
"""For what was cancelled to end; whoever has lost the lease must not linger."""


class Participant:
    """Without a registry in the settings nobody is known, nothing is registered, and there are no leases."""

    def __init__(self, config: ServiceConfig, role: Role, pool_id: str, listen: Sequence[Address]) -> None:
        """`listen`: where the service can be reached, if its settings do not tell where others find it."""
        self._registry = open_registry(config.registry) if config.registry else StaticRegistry([])
        self._is_registered = config.registry is not None
        addresses = config.advertise or [_by_name(address) for address in listen]
        reached_by_grpc = [address for address in addresses if address.is_grpc]
        member = Member(
            member_id=f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            role=role,
            pool_id=pool_id,
            address=str(addresses[0]),
            admin=str(reached_by_grpc[0]) if reached_by_grpc else "",
        )
        self._load: Callable[[], dict[str, float]] = dict
        self._epoch: Callable[[], int] = int
        self.roster = Roster(self._registry, min(1.0, config.registry_ttl_s / 3), 2 * config.registry_ttl_s)
        self._membership = Membership(
            self._registry, member, config.registry_ttl_s, lambda: self._load(), lambda: self._epoch()
        )

    @property
    def waits_for(self) -> str:
        """Why there is no lease yet, for people; empty once there is, or if none was asked for."""
        return self._membership.waits_for

    def tell(self, load: Callable[[], dict[str, float]], epoch: Callable[[], int] = int) -> None:
        """What to register from now on: figures, and the highest epoch used."""
        self._load, self._epoch = load, epoch

    async def take_lease(self, stop: Stop) -> int:
        """The epoch of the lease once it is this service's; 0 if the stop came first."""
        if not self._is_registered:
            return int(time.time() * 1000)
        taken, stopped = asyncio.create_task(self._membership.take_lease()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({taken, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return taken.result() if taken.done() else 0
        finally:
            taken.cancel()
            stopped.cancel()

    def find(self, role: Role, pool_id: str) -> Member:
        """The member to speak to. Raises NotReadyError if none is known."""
        if (found := self.roster.latest(role, pool_id)) is None:
            reason = f": {self.roster.away_reason}" if self.roster.away_reason else ""
            raise NotReadyError(f"no {role} of pool {pool_id!r} is registered{reason}")
        return found

    def find_all(self, role: Role, pool_id: str) -> list[Member]:
        """Those to choose from. Raises NotReadyError if none is known."""
        self.find(role, pool_id)
        return [member for member in self.roster.members if (member.role, member.pool_id) == (role, pool_id)]

    async def while_registered(self, serve: Callable[[], Awaitable[None]]) -> None:
        """Run `serve` as a member. Raises LeaseLostError, with `serve` cancelled, if another took the lease."""
        if not self._is_registered:
            await serve()
            return
        serving: asyncio.Future[None] = asyncio.ensure_future(serve())
        keeping = asyncio.create_task(self._membership.run())
        try:
            await asyncio.wait({serving, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            await serving
        finally:
            await _end({serving, keeping})


def _by_name(address: Address) -> Address:
    """This host's name in place of "all interfaces", which is no place to connect to."""
    host, _, port = address.target.rpartition(":")
    is_any = address.scheme == "grpc" and host in _ALL_INTERFACES
    return Address(address.scheme, f"{socket.gethostname()}:{port}") if is_any else address


@contextlib.asynccontextmanager
async def taking_part(
    config: ServiceConfig, role: Role, pool_id: str, listen: Sequence[Address]
) -> AsyncIterator[Participant]:
    """A participant whose roster is kept fresh."""
    participant = Participant(config, role, pool_id, listen)
    refreshing = asyncio.create_task(participant.roster.run())
    try:
        yield participant
    finally:
        await _end({refreshing})
        await participant._registry.close()


async def _end(tasks: set[asyncio.Future[None]]) -> None:
    """Cancel them, and wait until they have ended, or for so long as can be waited."""
    for task in tasks:
        task.cancel()
    _, lingering = await asyncio.wait(tasks, timeout=_END_TIMEOUT_S)
    if lingering:
        log.error("not ended in time", tasks=[str(task) for task in lingering], timeout_s=_END_TIMEOUT_S)
