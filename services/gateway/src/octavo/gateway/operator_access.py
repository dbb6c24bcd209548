"""Who may look into the server: the one place that decides it."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError


class OperatorAccess:
    """With an `admin_key`, whoever shows it. Without one, whoever calls a gateway that listens on this machine alone by
    a name of this machine, so that neither a proxy nor a foreign page that was given this address gets in."""

    def __init__(self, config: GatewayConfig) -> None:
        self._key = config.admin_key.get_secret_value().encode()
        self._is_local = is_loopback(config.host)

    def check(self, request: Request) -> None:
        """Raises FieldError with 401 or 403 unless the request may see what operators see."""
        if self._key:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
                message = "this needs the admin key of the gateway: Authorization: Bearer KEY"
                raise FieldError(None, message, "admin_key_required", status=401)
        elif not (self._is_local and is_loopback(_host_of(request))):
            message = (
                "without an admin key this is shown on the gateway's own machine only: set OCTAVO_GATEWAY_ADMIN_KEY"
            )
            raise FieldError(None, message, "admin_key_not_set", status=403)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _host_of(request: Request) -> str:
    try:
        return urlsplit("//" + request.headers.get("host", "")).hostname or ""
    except ValueError:
        return ""
