"""What a route hands on: a checked request, and how its answer is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.gateway.choice_output import Delta, OutputRules
from octavo.gateway.http_errors import ErrorReport
from octavo.gateway.prompt_record import PromptRecord
from octavo.gateway.request_account import RequestAccount
from octavo.gateway.request_part import Prompt
from octavo.gateway.sse import TextEvents

MAX_UNREAD_TOKENS = 262_144
"""Tokens of one stream, about 100 bytes each, that may wait for its client; with log-probabilities, each that is listed
counts as another token."""


class AnswerFormat(Protocol):
    """How a route writes its answers. One object per request."""

    def start(self, usage: dict[str, Any]) -> bytes:
        """The events of a stream before the first one of any choice; `usage` are the token counts."""

    def chunk(self, choice: int, delta: Delta, usage: Callable[[], dict[str, Any]]) -> bytes:
        """The events for what is new of one choice; empty if that shows nothing."""

    async def end(self, usage: dict[str, Any]) -> bytes:
        """The events that follow the last one of any choice."""

    def texts(self, choice: int) -> TextEvents | None:
        """What is written around a text of a choice that has begun, if there is nothing else to it."""

    def failure(self, report: ErrorReport) -> bytes:
        """The event that ends a stream early."""

    async def body(self, choices: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A checked request."""

    request_id: str
    prompts: Sequence[Prompt]
    records: Sequence[PromptRecord]
    """What becomes known of each prompt."""
    num_returned: int
    """Choices of each prompt in the answer. Where more are generated, it has the best ones."""
    cache_salt: bytes
    rules: OutputRules
    answer_format: AnswerFormat
    is_stream: bool
    received_s: float
    """`time.perf_counter()` at the request's arrival."""
    account: RequestAccount
    timeout_s: float | None = None
    """From then on."""

    @property
    def max_unread(self) -> int | None:
        """Tokens that may wait for the client; None for a beam search, whose tokens come all at once."""
        params = self.prompts[0].params
        return None if params.beam_width else MAX_UNREAD_TOKENS // (1 + (params.num_logprobs or 0))

    def seconds_left(self) -> float | None:
        """Until the request's deadline; None if it has none."""
        return None if self.timeout_s is None else self.timeout_s - (time.perf_counter() - self.received_s)
