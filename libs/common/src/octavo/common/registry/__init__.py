"""Who is there: members of a deployment, their leases, and what was last known of them."""

from octavo.common.registry.members import PROTOCOL_VERSION, Member
from octavo.common.registry.membership import LeaseLostError, Membership
from octavo.common.registry.open import RegistrySetting, open_registry
from octavo.common.registry.registry import Grant, Registry, RegistryAwayError
from octavo.common.registry.roster import Roster
from octavo.common.registry.static import StaticRegistry

__all__ = [
    "PROTOCOL_VERSION",
    "Grant",
    "LeaseLostError",
    "Member",
    "Membership",
    "Registry",
    "RegistryAwayError",
    "RegistrySetting",
    "Roster",
    "StaticRegistry",
    "open_registry",
]
