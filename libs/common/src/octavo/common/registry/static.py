"""The registry of a deployment whose members are written down: by flags, or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from octavo.common.errors import ProtocolError
from octavo.common.registry.members import Member
from octavo.common.registry.registry import Grant
from octavo.common.roles import Role


class StaticRegistry:
    """Members are those given. Whoever started them sees to it that there is one of each, so every lease is granted."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)

    @classmethod
    def from_file(cls, path: Path) -> StaticRegistry:
        """A JSON or YAML list of members. Raises OSError, and ProtocolError for what is none."""
        try:
            entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{path} cannot be read: {error}") from error
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ProtocolError(f"{path} is not a list of members")
        return cls([Member.from_fields(entry) for entry in entries])

    async def members(self) -> list[Member]:
        return list(self._members)

    async def register(self, member: Member, ttl_s: float) -> None:
        """It is written down already."""

    async def deregister(self, member: Member) -> None:
        """It stays written down."""

    async def take_lease(self, role: Role, pool_id: str, member_id: str, ttl_s: float, at_least: int) -> Grant:
        return Grant(at_least, member_id)

    async def keep_lease(self, role: Role, pool_id: str, member_id: str, ttl_s: float, epoch: int) -> bool:
        return True

    async def release_lease(self, role: Role, pool_id: str, member_id: str) -> None:
        """Nobody waits for it."""

    async def close(self) -> None:
        """There are no connections."""
