"""What chat and bench share in talking to an OpenAI-compatible server."""

from __future__ import annotations

import ipaddress
import json
import os
from typing import Any
from urllib.parse import urlsplit

import httpx


class ServerError(Exception):
    """The server cannot be reached, or refuses. The message is for people and says what to do, where that is known."""


def key_headers() -> dict[str, str]:
    """What tells the server who asks: the key in `OCTAVO_API_KEY`, if there is one."""
    key = os.environ.get("OCTAVO_API_KEY", "")
    return {"authorization": f"Bearer {key}"} if key else {}


class StreamEnd:
    """The event that ends every stream."""


STREAM_END = StreamEnd()


def trusts_proxy(url: str) -> bool:
    """Whether proxy settings of the environment apply: not to this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def parse_event(line: str) -> dict[str, Any] | StreamEnd | None:
    """One line of a server-sent event stream; None if it carries no data.

    Raises ServerError if it carries an error, or something that is not JSON.
    """
    if not line.startswith("data:"):
        return None
    data = line[len("data:") :].strip()
    if data == "[DONE]":
        return STREAM_END
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        raise ServerError(f"the server sent something that is not JSON: {data[:200]}") from None
    if "error" in event:
        raise ServerError(_message(event["error"]))
    return event


def refusal(response: httpx.Response) -> ServerError:
    """The error in an answer whose status is not 2xx; its body must have been read."""
    try:
        text = _message(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        text = response.text.strip()[:200] or response.reason_phrase
    hint = ". Set OCTAVO_API_KEY to a key of the server" if response.status_code == 401 else ""
    return ServerError(f"the server answered {response.status_code}: {text}{hint}")


def unreachable(url: str, error: httpx.TransportError) -> ServerError:
    """The error for a server that could not be reached or broke off."""
    if isinstance(error, httpx.ConnectError):
        return ServerError(
            f"no server answers at {url}. Start one with octavo serve (or make serve), or give its address with --url"
        )
    return ServerError(f"the connection to {url} failed: {error or type(error).__name__}")


def served_model(url: str) -> str:
    """The first model that the server lists. Raises ServerError."""
    try:
        response = httpx.get(f"{url}/v1/models", timeout=10.0, trust_env=trusts_proxy(url), headers=key_headers())
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise ServerError(f"{url} is not an address: write http://HOST:PORT") from error
    except httpx.TransportError as error:
        raise unreachable(url, error) from error
    if not response.is_success:
        raise refusal(response)
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise ServerError(f"what answers at {url} does not list models as an OpenAI-compatible server does") from None


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
