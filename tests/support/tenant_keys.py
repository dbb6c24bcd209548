"""Tenants with a key each."""

from __future__ import annotations

from octavo.gateway.api_keys import KeyBook, Tenant


class Keys(dict[str, str]):
    """A key of each tenant, by name."""

    def __init__(self, **tenants: Tenant) -> None:
        book = KeyBook()
        for name, tenant in tenants.items():
            book, self[name] = book.with_key(name, tenant)
        self.text = book.text()

    def of(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self[name]}"}
