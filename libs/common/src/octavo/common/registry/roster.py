"""Owns what this process last knew of the members. An outage of the registry changes nothing of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from octavo.common.registry.members import PROTOCOL_VERSION, Member, latest
from octavo.common.registry.registry import Registry, RegistryAwayError
from octavo.common.roles import Role

log = structlog.get_logger()


class Roster:
    """Refreshed while `run` runs.

    A member stays known for `keep_s` after the registry stopped to name it: a registry that has lost its memory is told
    again within that time. Whether a member is alive is for its link to say.
    """

    def __init__(
        self,
        registry: Registry,
        interval_s: float = 1.0,
        keep_s: float = 15.0,
    ) -> None:
        self._registry = registry
        self._interval_s, self._keep_s = interval_s, keep_s
        self.on_change: Callable[[], None] = lambda: None
        """Called when members have come, gone or changed."""
        self._known: dict[str, tuple[Member, float]] = {}
        """id |-> what it told last, and when the registry named it last"""
        self.away_reason = ""
        """Why the registry cannot be read; empty while it can."""

    @property
    def members(self) -> list[Member]:
        return [member for member, _ in self._known.values()]

    def latest(self, role: Role, pool_id: str) -> Member | None:
        """The member of this role and pool with the highest epoch."""
        return latest(self.members, role, pool_id)

    async def refresh(self) -> None:
        """Read the registry once. While it is away, what was known stays known."""
        try:
            told = await self._registry.members()
        except RegistryAwayError as error:
            if not self.away_reason:
                log.warning("registry away", error=str(error))
            self.away_reason = str(error)
            return
        if self.away_reason:
            log.info("registry is back")
            # What could not register meanwhile has the whole time to do so.
            self._known = {id_: (member, time.monotonic()) for id_, (member, _) in self._known.items()}
        self.away_reason = ""
        now, before = time.monotonic(), self.members
        for member in told:
            if member.protocol != PROTOCOL_VERSION:
                if member.member_id not in self._known:
                    log.warning("member of another protocol", member=member.member_id, protocol=member.protocol)
                continue
            self._known[member.member_id] = (member, now)
        self._known = {id_: known for id_, known in self._known.items() if now - known[1] <= self._keep_s}
        if self.members != before:
            self.on_change()

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval_s)
