"""How a value above one of the gateway's limits is refused."""

from __future__ import annotations

from octavo.gateway.http_errors import FieldError


def at_most(param: str, value: float, limit: float, what: str = "") -> None:
    """Raises FieldError that names the field."""
    if value > limit:
        raise FieldError(param, f"{param}: {value} {what}{' ' if what else ''}is above the limit of {limit}")
