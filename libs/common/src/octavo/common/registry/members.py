"""What a member of a deployment tells of itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.common.errors import ProtocolError
from octavo.common.links import Address
from octavo.common.links.protocol_version import NEWEST
from octavo.common.roles import Role

PROTOCOL_VERSION = NEWEST
"""Of the messages between services. Members of another version are not spoken to."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process."""

    member_id: str
    """Unlike that of any other process, also of the same service before a restart."""
    role: Role
    pool_id: str
    """The block pool that it serves; empty for a gateway."""
    address: str
    """Where its stream is opened, see `Address`."""
    admin: str = ""
    """gRPC address of its unary calls; empty if it has none that others can reach."""
    protocol: int = PROTOCOL_VERSION
    epoch: int = 0
    """Fencing number of its lease, uint64; 0 if its role needs none."""
    load: dict[str, float] = field(default_factory=dict)
    """Figures at the last renewal, by name."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """Raises ProtocolError if it is not one."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ProtocolError(f"not a member: {error}") from error
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: Any) -> Member:
        """Raises ProtocolError if they are not those of a member."""
        try:
            member = cls(
                member_id=str(fields["member_id"]),
                role=Role(fields["role"]),
                pool_id=str(fields["pool_id"]),
                address=str(fields["address"]),
                admin=str(fields.get("admin", "")),
                protocol=int(fields.get("protocol", PROTOCOL_VERSION)),
                epoch=int(fields.get("epoch", 0)),
                load={str(name): float(value) for name, value in fields.get("load", {}).items()},
            )
            for address in filter(None, (member.address, member.admin)):
                Address.parse(address)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ProtocolError(f"not a member: {error!r}") from error
        return member


def latest(members: list[Member], role: Role, pool_id: str) -> Member | None:
    """The one to speak to: of several, the one with the highest epoch; the others have been replaced."""
    found = [member for member in members if member.role is role and member.pool_id == pool_id]
    return max(found, key=lambda member: (member.epoch, member.member_id), default=None)
