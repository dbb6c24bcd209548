"""Derives what prefix blocks are salted with: tenants never share a block, whatever salts their clients send."""

from __future__ import annotations

import hashlib
import hmac

from octavo.gateway.config import GatewayConfig

SALT_HEAD_BYTES = 16
"""The same in all salts of a tenant, so that the KV manager can flush a tenant's blocks."""


def salt_of(config: GatewayConfig, tenant: str, client_salt: str | None) -> bytes:
    """The salt of a tenant's request."""
    return cache_salt(config.salt_secret.get_secret_value().encode(), tenant, client_salt or "")


def cache_salt(secret: bytes, tenant: str, client_salt: str) -> bytes:
    """The salt of a request: 16 bytes of the tenant's, then 16 bytes of the client's if it sent one.

    `tenant` is "" where requests are not authenticated. A client's salt only narrows what is shared within its tenant.
    """
    head = _mac(secret, b"tenant", tenant.encode())
    if not client_salt:
        return head[:SALT_HEAD_BYTES]
    return head[:SALT_HEAD_BYTES] + _mac(secret, b"client", head, client_salt.encode())[:16]


def _mac(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts with their lengths."""
    content = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(secret, content, hashlib.sha256).digest()
