"""What a registry of members offers, whatever keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.common.registry.members import Member
from octavo.common.roles import Role


class RegistryAwayError(Exception):
    """The registry has not answered in time. Whoever was known goes on."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to whoever wants to be the only one."""

    epoch: int
    """Fencing number, higher than any before; 0 if another member holds the lease."""
    holder_id: str
    """The member that holds it now."""


class Registry(Protocol):
    """Every call has a deadline, and raises RegistryAwayError after it."""

    async def members(self) -> list[Member]:
        """Those whose registration has not expired."""

    async def register(self, member: Member, ttl_s: float) -> None:
        """Be among the members for `ttl_s` from now, as told here."""

    async def deregister(self, member: Member) -> None:
        """Be a member no longer."""

    async def take_lease(self, role: Role, pool_id: str, member_id: str, ttl_s: float, at_least: int) -> Grant:
        """Become the only one of this role and pool, if nobody else is, with an epoch of at least `at_least`."""

    async def keep_lease(self, role: Role, pool_id: str, member_id: str, ttl_s: float, epoch: int) -> bool:
        """Hold it for `ttl_s` from now. False if another member has taken it; then it is lost for good.

        `epoch`: the highest that the holder has used. If the registry has lost its memory, this tells it again.
        """

    async def release_lease(self, role: Role, pool_id: str, member_id: str) -> None:
        """Let another member have it at once. Nothing happens if another one holds it."""

    async def close(self) -> None:
        """Let go of connections."""
