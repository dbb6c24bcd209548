"""What is remembered of a request: when it came, why it waited, what it found in the cache, what was taken from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from octavo.common.messages.kv import MissReason, WaitReason


class WaitCause(enum.StrEnum):
    """Why a sequence is not running."""

    BEHIND_OTHERS = "behind_others"  # others are before it in the queue
    NO_SLOT = "no_slot"  # as many sequences run as may
    PREFILL_BACKLOG = "prefill_backlog"  # prompts with blocks, not less urgent, fill the next step
    KV_ANSWER = "kv_answer"  # the KV manager has been asked for its blocks
    NO_BLOCKS = "no_blocks"  # too few blocks in the pool
    IN_FLIGHT_PREFIX = "in_flight_prefix"  # another sequence is computing its next block
    HASHING = "hashing"  # its tokens are not hashed yet
    NO_CREDIT = "no_credit"  # it has its slot, and its row sits out for want of one more block
    SWAPPED = "swapped"  # its blocks are in host memory
    POOL_LOST = "pool_lost"  # the worker or the KV manager is away

    @classmethod
    def of(cls, reason: WaitReason) -> WaitCause:
        """The cause that the KV manager's LATER stands for."""
        return _CAUSES[reason]


_CAUSES = {
    WaitReason.NONE: WaitCause.NO_BLOCKS,
    WaitReason.NO_BLOCKS: WaitCause.NO_BLOCKS,
    WaitReason.BEHIND_ANOTHER: WaitCause.BEHIND_OTHERS,
    WaitReason.IN_FLIGHT: WaitCause.IN_FLIGHT_PREFIX,
    WaitReason.HASHING: WaitCause.HASHING,
}

HIT_DEVICE, HIT_HOST = "hit_device", "hit_host"
SLOWER_TIER = MissReason.SLOWER_TIER.name.lower()
TAIL_NOT_FULL = "tail_not_full"
UNEXPLAINED = "unexplained"
"""Missed, and the KV manager gave no reason."""

BLOCK_OUTCOMES = (
    HIT_DEVICE,
    HIT_HOST,
    *(reason.name.lower() for reason in MissReason),
    TAIL_NOT_FULL,
    UNEXPLAINED,
)
"""What can become of a block of a prompt. Of one admission, the counts add up to its blocks."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Full blocks that were not found, for one reason."""

    reason: MissReason
    num_blocks: int
    evicted_by: str | None
    """Id of the request that the first of them gave way to; None if not known, or for another reason."""
    evictor_is_own: bool
    """That request has the same cache salt."""


@dataclass(frozen=True, slots=True)
class AdmissionRecord:
    """A sequence got its blocks."""

    at: float
    num_tokens: int
    num_blocks: int
    num_device_hits: int  # blocks
    num_host_hits: int  # blocks
    has_tail: bool
    """The last block is not full."""
    misses: tuple[Miss, ...]
    block_costs: tuple[float, float] | None = None
    """Seconds to copy a block from host memory and to compute it, as measured by then; None before any copy."""

    @property
    def num_unexplained(self) -> int:
        explained = sum(miss.num_blocks for miss in self.misses)
        return self.num_blocks - self.has_tail - self.num_device_hits - self.num_host_hits - explained

    def outcomes(self) -> dict[str, int]:
        """Blocks by outcome, without zeros."""
        counts = {HIT_DEVICE: self.num_device_hits, HIT_HOST: self.num_host_hits}
        for miss in self.misses:
            name = miss.reason.name.lower()
            counts[name] = counts.get(name, 0) + miss.num_blocks
        counts[TAIL_NOT_FULL], counts[UNEXPLAINED] = int(self.has_tail), self.num_unexplained
        return {outcome: count for outcome, count in counts.items() if count}


@dataclass(slots=True)
class PreemptionRecord:
    """A sequence lost its place on the worker."""

    at: float
    why: str
    kind: str
    """`recompute` drops its blocks, `swap` moves them to host memory."""
    num_computed_tokens: int
    """Tokens whose K and V it had."""
    num_blocks: int
    num_swapped_blocks: int = 0
    """Copied to host memory, to come back from there."""
    num_tokens_again: int | None = None
    """Tokens that it had to compute a second time; None until it has blocks again."""
    cost_s: float | None = None
    """Seconds of its copies and of computing again, by the rates of the worker; None until it has blocks again."""
    back_at: float | None = None
    """When it gave a token again."""


@dataclass(eq=False, slots=True)
class SequenceRecord:
    """One sequence of a request."""

    sequence_id: int
    choice_index: int
    request: RequestRecord
    wait_s: dict[WaitCause, float] = field(default_factory=dict)
    waits_for: WaitCause | None = None
    waits_since: float = 0.0
    admissions: list[AdmissionRecord] = field(default_factory=list)
    num_admissions: int = 0
    """All of them; `admissions` holds the first ones."""
    preemptions: list[PreemptionRecord] = field(default_factory=list)
    num_preemptions: int = 0
    finish_reason: str | None = None
    ended_at: float | None = None

    def waits(self, cause: WaitCause | None, now: float) -> tuple[WaitCause, float] | None:
        """From now on it waits for `cause`, or runs if that is None. Returns the wait that this ends, if any."""
        ended = None
        if self.waits_for is not None:
            ended = (self.waits_for, now - self.waits_since)
            self.wait_s[self.waits_for] = self.wait_s.get(self.waits_for, 0.0) + ended[1]
        self.waits_for, self.waits_since = cause, now
        return ended


@dataclass(eq=False, slots=True)
class RequestRecord:
    """One prompt and its choices."""

    request_id: str
    salt: bytes
    num_prompt_tokens: int
    num_choices: int
    arrived_at: float
    traceparent: str = ""
    """Of the span that it is told by."""
    sequences: list[SequenceRecord] = field(default_factory=list)
    num_output_tokens: int = 0
    """Of choices that have ended."""
    num_unlisted: int = 0
    """Sequences beyond those of `sequences`."""
    unlisted: dict[int, SequenceRecord] = field(default_factory=dict)
    """Those of them that have not ended, by id."""
    first_token_at: float | None = None
    ended_at: float | None = None
    error: tuple[str, str] | None = None
    """Reason and message."""
