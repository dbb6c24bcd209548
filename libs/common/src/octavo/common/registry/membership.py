"""Keeps one member registered, and its lease, for as long as it serves."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from octavo.common.registry.members import Member
from octavo.common.registry.registry import Registry, RegistryAwayError

log = structlog.get_logger()

_RETRY_S = 0.5


class LeaseLostError(OSError):
    """Another member holds the lease: this process must not go on."""


class Membership:
    """One member of the registry. `load` gives its figures at each renewal, `epoch` the highest that it has used."""

    def __init__(
        self,
        registry: Registry,
        member: Member,
        ttl_s: float,
        load: Callable[[], dict[str, float]] = dict,
        epoch: Callable[[], int] = int,
    ) -> None:
        self._registry = registry
        self._member = member
        self._ttl_s = ttl_s
        self._load = load
        self._epoch = epoch
        self._has_lease = False
        self._is_away = False
        """The registry did not take the last renewal."""
        self.waits_for = ""
        """Why there is no lease yet, for people; empty once there is."""

    @property
    def epoch(self) -> int:
        """That of the lease; 0 without one."""
        return self._member.epoch

    async def take_lease(self) -> int:
        """Wait until this member is the only one of its role and pool. Returns its epoch.

        The epoch is at least the milliseconds since 1970, so it rises also where no registry remembers the last one.
        """
        role, pool_id = self._member.role, self._member.pool_id
        self.waits_for = f"waits for the lease of {role} for pool {pool_id!r}"
        is_held = False
        while True:
            try:
                at_least = int(time.time() * 1000)
                grant = await self._registry.take_lease(role, pool_id, self._member.member_id, self._ttl_s, at_least)
            except RegistryAwayError as error:
                self.waits_for = f"waits for the lease of {role} for pool {pool_id!r}: {error}"
                if is_held:
                    await self._leave_time_to_renew()
            else:
                if grant.epoch:
                    break
                is_held = True
                self.waits_for = f"waits for the lease of {role} for pool {pool_id!r}, which {grant.holder_id} holds"
            await self._pause()
        self._has_lease, self.waits_for = True, ""
        self._member = replace(self._member, epoch=grant.epoch)
        log.info("lease taken", role=role, pool_id=pool_id, epoch=grant.epoch)
        return grant.epoch

    async def _leave_time_to_renew(self) -> None:
        """Return `ttl_s` after the registry is back: what expired meanwhile is the holder's still, if it lives."""
        is_back = False
        while not is_back:
            await self._pause()
            with contextlib.suppress(RegistryAwayError):
                await self._registry.members()
                is_back = True
        await asyncio.sleep(self._ttl_s)

    async def _pause(self) -> None:
        await asyncio.sleep(min(_RETRY_S, self._ttl_s / 3) * random.uniform(0.5, 1.0))

    async def run(self) -> None:
        """Register and renew until cancelled, then leave. Raises LeaseLostError if another member took the lease.

        While the registry is away nothing changes: who holds a lease goes on, and receivers refuse lower epochs.
        """
        try:
            while True:
                is_renewed = await self._renew()
                wait_s = self._ttl_s / 3 if is_renewed else min(_RETRY_S, self._ttl_s / 3)
                await asyncio.sleep(wait_s * random.uniform(0.8, 1.0))
        finally:
            await self._leave()

    async def _renew(self) -> bool:
        member = replace(self._member, load=self._load())
        try:
            if self._has_lease:
                epoch = max(self._member.epoch, self._epoch())
                lease = (member.role, member.pool_id, member.member_id)
                if not await self._registry.keep_lease(*lease, self._ttl_s, epoch):
                    self._has_lease = False
                    raise LeaseLostError(f"another {member.role} has taken the lease for pool {member.pool_id!r}")
                member = replace(member, epoch=epoch)
            await self._registry.register(member, self._ttl_s)
        except RegistryAwayError as error:
            tell = log.debug if self._is_away else log.warning
            tell("not registered", error=str(error))
            self._is_away = True
            return False
        self._is_away = False
        return True

    async def _leave(self) -> None:
        with contextlib.suppress(RegistryAwayError):
            await self._registry.deregister(self._member)
            if self._has_lease:
                await self._registry.release_lease(self._member.role, self._member.pool_id, self._member.member_id)
