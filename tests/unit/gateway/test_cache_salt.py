"""Salts of prefix blocks."""

from __future__ import annotations

import pytest

from octavo.gateway.cache_salt import SALT_HEAD_BYTES, cache_salt


def test_the_same_tenant_and_salt_give_the_same_bytes_in_every_process() -> None:
    assert cache_salt(b"", "", "").hex() == "8556703b2c229bd6fd700f2d904116ea"
    assert cache_salt(b"", "", "chat-7").hex() == "8556703b2c229bd6fd700f2d904116eaa642d78875811800894252c620373cbc"


def test_a_client_cannot_choose_the_salt_of_another_tenant() -> None:
    """Neither the name of a tenant nor its salt, sent as a client's salt, gives that tenant's blocks."""
    theirs = cache_salt(b"key", "acme", "")
    narrowed = cache_salt(b"key", "acme", "x")
    for guess in ("acme", "x", theirs.decode("latin1"), narrowed.decode("latin1"), theirs.hex()):
        assert cache_salt(b"key", "evil", guess) not in (theirs, narrowed)
        assert cache_salt(b"key", "", guess) not in (theirs, narrowed)


def test_a_client_salt_narrows_within_the_tenant() -> None:
    salts = [cache_salt(b"key", "acme", client_salt) for client_salt in ("", "a", "b")]
    assert len(set(salts)) == 3
    assert len({salt[:SALT_HEAD_BYTES] for salt in salts}) == 1


@pytest.mark.parametrize("other", [(b"other", "acme", "a"), (b"key", "acmea", ""), (b"key", "acm", "ea")])
def test_secret_and_tenant_change_the_salt(other: tuple[bytes, str, str]) -> None:
    assert cache_salt(*other)[:SALT_HEAD_BYTES] != cache_salt(b"key", "acme", "a")[:SALT_HEAD_BYTES]
