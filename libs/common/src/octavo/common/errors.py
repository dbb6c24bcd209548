"""Every error that one service may tell another.

OctavoError
├── InvalidRequestError        the request can never be served as it is
│   ├── PromptTooLongError     prompt and max_tokens exceed the model's length
│   ├── TokenOutOfRangeError   a token id that the embedding does not have
│   └── InvalidGrammarError    a grammar that the worker cannot follow
├── UnknownModelError          no such model here
├── UnknownResponseError       no such response to branch from
├── QueueFullError             too many requests wait
├── DeadlineExceededError      the request has not ended within the time that it gave
├── NotReadyError              no model is loaded, or a service it needs is away
├── OverloadedLinkError        the other end reads too slowly, its buffer is full
├── LinkClosedError            the other end is gone
│   └── UnresponsiveError      nothing comes from it any more: it hangs, or the way to it does
├── ProtocolError              a message that breaks the contract: a bug, or two versions
│   ├── ProtocolVersionError   the two ends speak no common version
│   ├── StaleEpochError        the sender has been replaced
│   ├── MessageGapError        a message or step number that is not the last plus one
│   └── StaleBlockError        a block id of an earlier generation
├── NumericError               the model gave logits that are not finite
└── InternalError              anything else, its text withheld
"""

from __future__ import annotations

from typing import ClassVar


class OctavoError(Exception):
    """Base of all errors with a meaning outside the service that raises them."""

    reason: ClassVar[str] = "OCTAVO_ERROR"
    """Machine-readable name on the wire."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequestError(OctavoError):
    reason = "INVALID_REQUEST"


class PromptTooLongError(InvalidRequestError):
    reason = "PROMPT_TOO_LONG"


class TokenOutOfRangeError(InvalidRequestError):
    reason = "TOKEN_OUT_OF_RANGE"


class InvalidGrammarError(InvalidRequestError):
    reason = "INVALID_GRAMMAR"


class UnknownModelError(OctavoError):
    reason = "UNKNOWN_MODEL"


class UnknownResponseError(OctavoError):
    reason = "UNKNOWN_RESPONSE"


class QueueFullError(OctavoError):
    reason = "QUEUE_FULL"


class DeadlineExceededError(OctavoError):
    reason = "DEADLINE_EXCEEDED"


class NotReadyError(OctavoError):
    reason = "NOT_READY"


class OverloadedLinkError(OctavoError):
    reason = "OVERLOADED_LINK"


class LinkClosedError(OctavoError):
    reason = "LINK_CLOSED"


class UnresponsiveError(LinkClosedError):
    reason = "UNRESPONSIVE"


class ProtocolError(OctavoError):
    reason = "PROTOCOL_ERROR"


class ProtocolVersionError(ProtocolError):
    reason = "PROTOCOL_VERSION"


class StaleEpochError(ProtocolError):
    reason = "STALE_EPOCH"


class MessageGapError(ProtocolError):
    reason = "MESSAGE_GAP"


class StaleBlockError(ProtocolError):
    reason = "STALE_BLOCK"


class NumericError(OctavoError):
    reason = "NUMERIC_ERROR"


class InternalError(OctavoError):
    reason = "INTERNAL"


def _tree(root: type[OctavoError]) -> list[type[OctavoError]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


_BY_REASON = {error.reason: error for error in _tree(OctavoError)}


def from_reason(reason: str, message: str) -> OctavoError:
    """The error that another service told us of; a reason we do not know becomes an `InternalError`."""
    return _BY_REASON.get(reason, InternalError)(message)
