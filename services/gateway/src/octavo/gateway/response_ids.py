"""The ids that clients know responses by."""

from __future__ import annotations

COMPLETION_PREFIX = "cmpl-"
CHAT_PREFIX = "chatcmpl-"
MESSAGE_PREFIX = "msg_"
RESPONSE_PREFIX = "resp_"
PREFIXES = (COMPLETION_PREFIX, CHAT_PREFIX, MESSAGE_PREFIX)


def request_id_of(response_id: str) -> str:
    """The request's own id, which is also its `x-request-id`."""
    for prefix in PREFIXES:
        if response_id.startswith(prefix):
            return response_id.removeprefix(prefix)
    return response_id


def ids_of(given: str) -> list[str]:
    """What a request may be known by that is named by its own id or by its answer's: as given, and without prefix."""
    return [given] if request_id_of(given) == given else [given, request_id_of(given)]
