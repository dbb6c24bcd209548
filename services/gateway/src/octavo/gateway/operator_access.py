"""Who may look into the server: the one place that decides it."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import RefusedError, report


class OperatorAccess:
    """Where API keys are asked for, operators, of whom `TenancyMiddleware` makes sure. Else, with an `admin_key`,
    whoever shows it. Without one, whoever calls a gateway that listens on this machine alone by a name of this machine,
    so that neither a proxy nor a foreign page that was given this address gets in."""

    def __init__(self, config: GatewayConfig, *, asks_for_api_keys: bool) -> None:
        self._asks_for_api_keys = asks_for_api_keys
        self._key = config.admin_key.get_secret_value().encode()
        self._is_local = is_loopback(config.host)

    def check(self, request: Request) -> None:
        """Raises RefusedError with 401 or 403 unless the request may see what operators see."""
        if self._asks_for_api_keys:
            return
        if self._key:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
                message = "this needs the admin key of the gateway: Authorization: Bearer KEY"
                raise _refusal(401, message, "admin_key_required", {"www-authenticate": "Bearer"})
        elif not (self._is_local and is_loopback(_host_of(request))):
            message = (
                "without an admin key this is shown on the gateway's own machine only: set OCTAVO_GATEWAY_ADMIN_KEY"
            )
            raise _refusal(403, message, "admin_key_not_set")


def _refusal(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> RefusedError:
    return RefusedError(report(status, message, "invalid_request_error", None, code, headers))


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
