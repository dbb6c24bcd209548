"""Addresses of services."""

from __future__ import annotations

from dataclasses import dataclass

_SCHEMES = ("frames", "grpc", "grpc+unix")
_LOOPBACK = ("localhost", "::1")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens, and by which carrier."""

    scheme: str
    target: str
    """A path for `frames` and `grpc+unix`, host:port for `grpc`."""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `scheme://target`. Raises ValueError that says what was expected."""
        scheme, separator, target = text.partition("://")
        if not separator or scheme not in _SCHEMES or not target:
            expected = ", ".join(f"{known}://..." for known in _SCHEMES)
            raise ValueError(f"address {text!r} is not one of {expected}")
        if scheme == "grpc" and ":" not in target:
            raise ValueError(f"address {text!r} has no port: write grpc://host:port")
        return cls(scheme, target)

    @classmethod
    def of_grpc_target(cls, target: str) -> Address:
        """From gRPC's own notation. Raises ValueError as `parse` does."""
        path = target.removeprefix("unix:")
        return cls.parse(f"grpc+unix://{path}" if path != target else f"grpc://{target}")

    @property
    def is_grpc(self) -> bool:
        return self.scheme != "frames"

    @property
    def is_network(self) -> bool:
        """Other hosts may reach it: neither a Unix socket nor this host's own loopback interface."""
        host = self.target.rpartition(":")[0].strip("[]")
        return self.scheme == "grpc" and host not in _LOOPBACK and not host.startswith("127.")

    @property
    def grpc_target(self) -> str:
        """The target in gRPC's own notation."""
        return f"unix:{self.target}" if self.scheme == "grpc+unix" else self.target

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}"
