"""The ids that clients know responses by."""

from __future__ import annotations

COMPLETION_PREFIX = "cmpl-"
CHAT_PREFIX = "chatcmpl-"


def request_id_of(response_id: str) -> str:
    """The request's own id, which is also its `x-request-id`."""
    for prefix in (COMPLETION_PREFIX, CHAT_PREFIX):
        if response_id.startswith(prefix):
            return response_id.removeprefix(prefix)
    return response_id
