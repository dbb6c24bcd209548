"""What a member of a deployment does.

A certificate speaks for a role if ROLE.octavo.internal is among its DNS subject alternative names. That name, not the
host's, is what a client asks of a server; a server looks for it in the certificate of a client.
"""

from __future__ import annotations

import enum

_DOMAIN = "octavo.internal"


class Role(enum.StrEnum):
    """What a member does."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    KVMANAGER = "kvmanager"
    WORKER = "worker"
    OPERATOR = "operator"
    """A person's tools, such as `octavo inspect`. Never a member of the registry."""

    @property
    def certificate_name(self) -> str:
        """The DNS name by which a certificate speaks for this role."""
        return f"{self}.{_DOMAIN}"
