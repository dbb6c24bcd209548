"""The scheduler-KV manager hop: one message a step each way. See proto/octavo/v1/kvmanager_service.proto."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Verdict(enum.IntEnum):
    """The answer to an admission or a fork."""

    OK = 1  # the blocks are allocated
    LATER = 2  # does not fit at present; ask again
    NEVER = 3  # larger than the pool can ever hold


@dataclass(frozen=True, slots=True)
class OpenPool:
    """First message of a scheduler on a stream: the pool it drives.

    Steps and copies of those who drove the worker before have ended.
    """

    pool_id: str
    epoch: int
    """Fencing number of the scheduler. A lower one than the pool has seen is refused."""
    incarnation: int
    """The worker group's life. A pool of an earlier one is dropped with all it holds."""
    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    """Blocks of host memory that the worker group has for swap and as a lower tier."""
    resume_boot_epoch: int = 0
    """Life of the KV manager in which this scheduler had the pool open; 0 asks for one where nobody holds a block."""
    last_reply_no: int = 0
    """Last reply received in that life."""
    kv_format: str = ""
    """How the worker group stores K and V. Blocks of one format are never found by keys of another."""
    generations: tuple[int, ...] = ()
    """See WorkerReady. Told by a scheduler that has just taken the worker: a block whose generation is higher than the
    manager knows holds something unknown. Empty if a `DeclarePool` follows."""


@dataclass(frozen=True, slots=True)
class PoolOpened:
    """The pool takes messages. With `is_resumed` it is as it was, and replies that were lost follow; otherwise nobody
    holds a block of it, and it takes messages from `message_no` 1, the first of which may be a `DeclarePool`. What is
    known to be cached in this life of the worker group's memory is found either way."""

    pool_id: str
    boot_epoch: int
    """One life of the KV manager, never 0."""
    is_resumed: bool = False
    last_message_no: int = 0
    """Last message applied; later ones are sent again."""


@dataclass(frozen=True, slots=True)
class DeclaredTable:
    """A sequence that a scheduler holds while its KV manager was replaced."""

    sequence_id: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    """Accepted positions whose K and V are written."""
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    salt: bytes = b""
    adapter: str = ""
    adapter_generation: int = 0


@dataclass(frozen=True, slots=True)
class DeclarePool:
    """What a scheduler holds, told to a new KV manager before anything else.

    Blocks that it does not name are quarantined until `launched_step` is acknowledged.
    """

    tables: list[DeclaredTable]
    credits: list[tuple[int, int]]
    """(block_id, generation): credits in hand."""
    launched_step: int
    """Last step launched."""
    acknowledged_step: int
    recycled: list[tuple[int, int]] = field(default_factory=list)
    """(block_id, generation): blocks whose content and generation the scheduler changed while nobody managed."""
    highest_generation: int = 0
    """Of all generations that the scheduler was told or made: the worker has seen no higher one."""


class Publication(NamedTuple):
    """Blocks of a sequence that are full and computed: they become findable by their hash.

    A tuple, as a sixteenth of all sequences has one in each step.
    """

    sequence_id: int
    num_computed_tokens: int
    """Positions whose K and V are written, for accepted tokens only."""
    new_token_ids: Sequence[int] = ()
    """Tokens of the sequence that the manager has not been told yet, in order, up to the last full block."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A new sequence that shares the first `num_tokens` positions of a live one."""

    parent_id: int
    child_id: int
    num_tokens: int
    num_table_tokens: int = 0
    """Positions that the child's table must cover, all or nothing, if more than those shared."""


@dataclass(frozen=True, slots=True)
class Release:
    """The sequence gives up its table, or will not ask for one after its `Arrival`. By id: the manager's table is the
    truth."""

    sequence_id: int
    last_step: int
    """The last step launched so far; its acknowledgement is the fence of every block of the table."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence that will ask for blocks: its tokens are hashed off the step, before it does.

    What enters the hash of its blocks beside the tokens: the salt, the adapter and the adapter's load generation.
    """

    sequence_id: int
    token_ids: Sequence[int]
    """At best an `array('i')`: a long prompt is copied as a whole then."""
    salt: bytes = b""
    adapter: str = ""
    adapter_generation: int = 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence asks for blocks for all its tokens, all or nothing, prefix hits first."""

    sequence_id: int
    token_ids: tuple[int, ...] = ()
    """Empty if an `Arrival` has told them."""
    salt: bytes = b""
    computes_itself: bool = False
    """Does not wait for another sequence that computes its next block."""
    num_table_tokens: int = 0
    """Positions that the table must cover, if more than the tokens. Its new blocks then are neighbours (a slab)."""
    ignores_cache: bool = False
    """Gets no block that holds something already: every position is wanted."""


@dataclass(frozen=True, slots=True)
class SwapOut:
    """The end of a sequence's table goes to host memory; its device blocks come free once the copy is done."""

    sequence_id: int
    num_kept_blocks: int
    """Leading blocks that stay on the device; 0 swaps the whole table."""
    last_step: int
    """The last step launched: the sequence's last writer is not after it."""


@dataclass(frozen=True, slots=True)
class SwapIn:
    """A swapped sequence asks for its device blocks again, all or nothing."""

    sequence_id: int
    num_tokens: int
    """Positions that the table must cover."""


class TransferDirection(enum.IntEnum):
    """Between which memories blocks are copied."""

    TO_HOST = 1
    TO_DEVICE = 2


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies of whole blocks between device and host, one for one. Acknowledged by its id when the bytes are there."""

    transfer_id: int
    direction: TransferDirection
    device_ids: tuple[int, ...]
    generations: tuple[int, ...]
    """Of the device blocks."""
    host_ids: tuple[int, ...]


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
    """In the order in which they should be served; after the first that finds no blocks the rest are LATER too."""
    credit_target: int = 0
    """Credits that the scheduler wants to hold; the reply tops up to it, or recalls above it."""
    arrivals: list[Arrival] = field(default_factory=list)
    """Known before the admissions of the same message; long ones are hashed after the reply is sent."""
    finished_transfers: list[int] = field(default_factory=list)
    """Transfers whose bytes have arrived. Applied with the acknowledgement."""
    swap_outs: list[SwapOut] = field(default_factory=list)
    """Applied after forks, before releases."""
    swap_ins: list[SwapIn] = field(default_factory=list)
    """Applied before admissions, in the order in which they should be served."""
    last_reply_no: int = 0
    """Replies up to it have arrived; they need not be kept."""
    skips_host_prefixes: bool = False
    """Prefix blocks in host memory are not restored for these admissions: to compute them costs less, as measured."""


class WaitReason(enum.IntEnum):
    """Why an admission or a swap-in got LATER."""

    NONE = 0
    NO_BLOCKS = 1  # too few blocks
    BEHIND_ANOTHER = 2  # one before it did not fit
    IN_FLIGHT = 3  # another sequence is computing its next block
    HASHING = 4  # its tokens are not hashed yet


class MissReason(enum.IntEnum):
    """Why a full block of a prompt was not found."""

    NEVER_STORED = 1
    EVICTED = 2
    OTHER_SALT = 3
    OTHER_ADAPTER = 4
    IN_FLIGHT = 5  # being computed by another sequence, and not waited for
    LAST_TOKEN = 6  # stored, but a token must be left to compute logits from
    FLUSHED = 7
    SLOWER_TIER = 8  # in host memory, and computed in less time than it is copied


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Full prompt blocks that were missed for one reason."""

    reason: MissReason
    num_blocks: int
    evicted_by: int = 0
    """For EVICTED: the sequence that the first of them was evicted for; 0 if not known."""


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
    wait_reason: WaitReason = WaitReason.NONE
    """With LATER."""
    awaited_sequence_id: int = 0
    """With IN_FLIGHT: the sequence that computes the next block."""
    num_host_tokens: int = 0
    """Of `num_cached_tokens`, those that come from host memory by `transfer_id`."""
    transfer_id: int = 0
    """A transfer that must be acknowledged before the sequence may run; 0 if none."""
    misses: tuple[PrefixMiss, ...] = ()


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """The answer to one swap-out: OK with the transfer that saves it, or LATER if host memory is full."""

    sequence_id: int
    verdict: Verdict
    transfer_id: int = 0


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """The answer to one swap-in."""

    sequence_id: int
    verdict: Verdict
    transfer_id: int = 0
    """Must be acknowledged before the sequence may run."""
    block_ids: tuple[int, ...] = ()
    """The whole table in order."""
    generations: tuple[int, ...] = ()
    wait_reason: WaitReason = WaitReason.NONE


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of one whole block inside the worker's pool."""

    source_id: int
    target_id: int
    source_generation: int = 0
    """As of before the plan that carries the copy."""
    target_generation: int = 0


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
    """Blocks by state; those of the device add up to `num_blocks`, those of the host to `num_host_blocks`."""

    free: int
    granted: int
    active: int
    cached: int
    quarantined: int
    transferring: int = 0
    """Source or target of a copy that is not acknowledged."""
    host_free: int = 0
    host_swapped: int = 0
    """Hold swapped sequences."""
    host_cached: int = 0
    """Hold evicted prefix blocks."""

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
    swapped_out: list[SwappedOut] = field(default_factory=list)
    """One for each swap-out, in order."""
    swapped_in: list[SwappedIn] = field(default_factory=list)
    """One for each swap-in, in order."""
    transfers: list[Transfer] = field(default_factory=list)
    """For the next plan, whatever it runs."""


@dataclass(frozen=True, slots=True)
class StreamRefused:
    """The last message of a stream that the KV manager ends: why."""

    reason: str
    message: str


KvManagerRequest = OpenPool | DeclarePool | KvRequest
KvManagerReply = PoolOpened | KvReply | StreamRefused
