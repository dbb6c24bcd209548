"""The scheduler-KV manager hop: one message a step each way. See proto/octavo/v1/kvmanager_service.proto."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Verdict(enum.IntEnum):
    """The answer to an admission or a fork."""

    OK = 1  # the blocks are allocated
    LATER = 2  # does not fit at present; ask again
    NEVER = 3  # larger than the pool can ever hold


@dataclass(frozen=True, slots=True)
class OpenPool:
    """First message of a scheduler on a stream: the pool it drives, empty."""

    pool_id: str
    epoch: int
    """Fencing number of the scheduler. A lower one than the pool has seen is refused."""
    incarnation: int
    """The worker group's life. A pool of an earlier one is dropped with all it holds."""
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PoolOpened:
    """The pool is empty and takes messages from `message_no` 1."""

    pool_id: str
    boot_epoch: int
    """One life of the KV manager."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Blocks of a sequence that are full and computed: they become findable by their hash."""

    sequence_id: int
    num_computed_tokens: int
    """Positions whose K and V are written, for accepted tokens only."""
    new_token_ids: tuple[int, ...] = ()
    """Tokens of the sequence that the manager has not been told yet, in order, up to the last full block."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A new sequence that shares the first `num_tokens` positions of a live one."""

    parent_id: int
    child_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Release:
    """The sequence gives up its table. By id: the manager's table is the truth."""

    sequence_id: int
    last_step: int
    """The last step launched so far; its acknowledgement is the fence of every block of the table."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence asks for blocks for all of `token_ids`, all or nothing, prefix hits first."""

    sequence_id: int
    token_ids: tuple[int, ...]
    salt: bytes = b""


@dataclass(frozen=True, slots=True)
class KvRequest:
    """One step's news and wishes. Items apply in the order of the fields."""

    message_no: int
    """Contiguous from 1 on each stream."""
    acknowledged_step: int
    """The last step whose result the scheduler has: fences up to it are open."""
    spent: list[tuple[int, int]] = field(default_factory=list)
    """(sequence_id, block_id): a credit that now stands at the end of the sequence's table."""
    publications: list[Publication] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    returned_credits: list[int] = field(default_factory=list)
    """Block ids of credits given back unused."""
    admissions: list[Admission] = field(default_factory=list)
    """In the order in which they should be served; after the first LATER the rest are LATER too."""
    credit_target: int = 0
    """Credits that the scheduler wants to hold; the reply tops up to it, or recalls above it."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The answer to one admission."""

    sequence_id: int
    verdict: Verdict
    num_cached_tokens: int = 0
    """Positions already computed, a multiple of the block size, less than the tokens asked for."""
    block_ids: tuple[int, ...] = ()
    """The whole table in order, hits first."""
    generations: tuple[int, ...] = ()
    """Generation of each block."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of one whole block inside the worker's pool."""

    source_id: int
    target_id: int


@dataclass(frozen=True, slots=True)
class Forked:
    """The answer to one fork."""

    child_id: int
    verdict: Verdict
    block_ids: tuple[int, ...] = ()
    generations: tuple[int, ...] = ()
    copy: BlockCopy | None = None
    """Set if the part-filled tail block must be copied before the child's first step."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; they add up to `num_blocks`."""

    free: int
    granted: int
    active: int
    cached: int
    quarantined: int

    @property
    def allocatable(self) -> int:
        """Blocks that the manager could hand out at once."""
        return self.free + self.cached


@dataclass(frozen=True, slots=True)
class KvReply:
    """The answer to the `KvRequest` of the same number."""

    message_no: int
    forked: list[Forked]
    admitted: list[Admitted]
    credits: list[tuple[int, int]]
    """(block_id, generation): new credits."""
    num_recalled_credits: int
    """Credits that the scheduler is asked to give back, because admissions need them."""
    counts: PoolCounts


KvManagerRequest = OpenPool | KvRequest
KvManagerReply = PoolOpened | KvReply
