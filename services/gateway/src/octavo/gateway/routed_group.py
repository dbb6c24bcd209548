"""A worker group that requests are routed to: owns what waits there, by this gateway's count."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.common.codecs.arrays import pack_int32
from octavo.common.messages.generation import SchedulerLoad
from octavo.gateway import metrics
from octavo.gateway.generation import Generation
from octavo.gateway.pool_directory import PoolDirectory, PrefixMatcher
from octavo.gateway.request_part import Prompt
from octavo.gateway.routing import Candidate
from octavo.gateway.scheduler_client import SchedulerClient


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group at this moment, for people."""

    pool_id: str
    why_not_ready: str
    """Empty if it is ready."""
    load: SchedulerLoad
    num_open_requests: int
    """Prompts of this gateway that are with its scheduler."""
    num_routed_requests: int
    """Requests that this gateway has sent there."""


@dataclass(slots=True, eq=False)
class RoutedGroup:
    """A block pool with its scheduler."""

    pool_id: str
    client: SchedulerClient
    directory: PoolDirectory
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    waiting: dict[Generation, int] = field(default_factory=dict)
    """Those that have not begun |-> tokens to compute, as foreseen"""
    num_routed_requests: int = 0

    @property
    def num_waiting_tokens(self) -> int:
        self.waiting = {
            generation: num_tokens
            for generation, num_tokens in self.waiting.items()
            if self.client.has(generation) and not generation.is_started
        }
        return sum(self.waiting.values())

    @property
    def is_idle(self) -> bool:
        """Nothing waits there."""
        return not (self.client.load.num_waiting or self.num_waiting_tokens)

    @property
    def state(self) -> GroupState:
        client = self.client
        return GroupState(
            self.pool_id, client.why_not_ready, client.load, client.num_open_requests, self.num_routed_requests
        )

    def candidate(self, num_matched_tokens: int) -> Candidate:
        return Candidate(
            load=self.client.load,
            num_matched_tokens=num_matched_tokens,
            num_open=self.client.num_open_requests,
            num_waiting_tokens=self.num_waiting_tokens,
            block_size=self.client.model.block_size if self.client.model else 1,
        )

    def note(self, generation: Generation, prompts: Sequence[Prompt], cache_salt: bytes, *, is_only: bool) -> None:
        """It was sent there, and counts as work that waits until it begins, unless there is no other group."""
        self.num_routed_requests += 1
        metrics.ROUTED_REQUESTS.labels(self.pool_id).inc()
        if not is_only:
            num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            matcher = PrefixMatcher(pack_int32(prompts[0].token_ids), cache_salt)
            self.waiting[generation] = num_tokens - matcher.num_matched_tokens(self.directory)
