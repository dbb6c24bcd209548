"""Addresses of links, as settings spell them."""

from __future__ import annotations

import pytest

from octavo.common.links import Address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("frames:///run/a.sock", Address("frames", "/run/a.sock")),
        ("grpc://localhost:80", Address("grpc", "localhost:80")),
        ("grpc+unix://a", Address("grpc+unix", "a")),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "frames", "frames://", "http://x", "grpc://host", "/run/a.sock"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Address.parse(text)
