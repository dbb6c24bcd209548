"""The scheduler-worker hop: one plan and one result a step. See proto/octavo/v1/worker_service.proto."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.common.messages.generation import PromptLogprobs, TokenLogprobs
from octavo.common.messages.kv import BlockCopy, Transfer
from octavo.common.messages.token_rules import TokenRules


class RowFlag:
    """What a row of a step does beside writing K and V: bits, joined by `|`.

    Plain integers: an operator of `enum.IntFlag` takes 2 us, longer than all else that is done for a row.
    """

    NONE = 0
    SAMPLE = 1  # samples one token from the row's last position
    FAN_OUT = 2  # samples one token per seed of the slot, for the choices of one prompt
    FED_BY_LAST_SAMPLE = 4  # the input is the token that this slot sampled last; none is sent
    PROMPT_LOGPROBS = 8  # tells the log-probabilities of the prompt tokens that follow its inputs


NOT_FINITE = -1
"""In place of a token: the model's logits were not finite."""
GRAMMAR_FAILED = -2
"""The slot's grammar cannot be compiled, needs too much work, or allows no token."""
NOT_READY = -3
"""What the slot's grammar allows is not known yet; the row is to be launched again."""


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """First message of a scheduler on a stream."""

    epoch: int
    """Fencing number of the scheduler. A lower one than the worker has seen is refused."""
    resume_incarnation: int = 0
    """Life of the KV pool in which this scheduler was driving the worker; 0 closes all slots."""
    last_result: int = 0
    """Last result received in that life."""
    begins_new_life: bool = False
    """The pool's contents are not to be trusted. Otherwise the worker keeps them."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The answer to a hello: the model is loaded and a warm-up step ran.

    With `is_resumed` slots and pool are as they were, and results that were lost follow. Otherwise all slots are
    closed, the worker takes steps from `step_id` 1, and every step and copy from before has ended or will never begin.
    """

    incarnation: int
    """One life of this worker's KV pool, never 0; the pool's contents of earlier ones count as lost."""
    model_name: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_host_blocks: int = 0
    """Blocks of host memory for swap and as a lower tier."""
    is_resumed: bool = False
    last_step: int = 0
    """Last plan accepted; later ones are sent again."""
    kv_format: str = ""
    """How K and V are stored: their type, and a digest of the scales of e4m3."""
    generations: tuple[int, ...] = ()
    """Of each block the last one seen when the slots were closed, -1 for none; empty if none was used in this life."""


@dataclass(frozen=True, slots=True)
class SlotRules:
    """What changes the logits of a slot's rows, and the tokens that it depends on."""

    rules: TokenRules
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    """All that there are when the slot is opened."""
    ending_token_ids: tuple[int, ...]
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """A sequence takes a slot. Its table is empty until a delta fills it."""

    slot: int
    sequence_id: int
    seeds: tuple[int, ...]
    """uint64. The first is the sequence's own; the others are those of the choices that a FAN_OUT row draws for."""
    temperature: float
    top_p: float
    top_k: int
    num_logprobs: int | None
    rules: SlotRules | None = None
    traceparent: str = ""
    """W3C trace context of the request; empty if it is not traced."""


class TableDelta(NamedTuple):
    """Block ids appended to a slot's block table. A tuple, as a sixteenth of all slots has one in each step."""

    slot: int
    start_index: int
    """Entries the table already has; anything else is a lost delta, and the plan is refused."""
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharingGroup:
    """Rows whose tables begin with the same blocks. A hint: the worker compares the ids on its mirror."""

    slots: tuple[int, ...]
    num_blocks: int
    """Leading blocks that all of them share."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over one batch.

    Order of effects: closes, opens, table deltas, transfers to the host, block copies, transfers to the device, then
    the rows. A transfer may end later than its step. A block that one to the host reads may have a new owner already,
    who writes only after it was read; all other blocks of a transfer are touched by nobody until it is acknowledged.
    The generation of a block that goes to the host is as of before the plan.
    A plan without rows has its result when every transfer has ended.
    Row i computes positions `starts[i]` to `starts[i] + lengths[i] - 1` of the sequence in `slots[i]`.
    """

    step_id: int
    """Contiguous from 1 on each stream."""
    closed_slots: list[int] = field(default_factory=list)
    opened_slots: list[OpenSlot] = field(default_factory=list)
    table_deltas: list[TableDelta] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    flags: list[int] = field(default_factory=list)
    """`RowFlag` bits of each row."""
    token_ids: list[int] = field(default_factory=list)
    """Input tokens of all rows that are not FED_BY_LAST_SAMPLE, joined in row order."""
    transfers: list[Transfer] = field(default_factory=list)
    groups: list[SharingGroup] = field(default_factory=list)
    acknowledged_step: int = 0
    """Results up to it have arrived; they need not be kept."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled."""

    step_id: int
    token_ids: list[int]
    """In row order: one for each SAMPLE row, one per seed for each FAN_OUT row; or NOT_FINITE and the like."""
    logprobs: list[TokenLogprobs | None]
    """One for each token id, or empty if no row asked for any."""
    compute_us: int
    """Time from the start of the step to its last token."""
    idle_us: int
    """Time before it in which the worker had no plan to run."""
    finished_transfers: list[int] = field(default_factory=list)
    """Transfers, of this step or earlier ones, whose bytes have arrived."""
    transfer_us: int = 0
    """Time that the copies of those took."""
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)
    """(row, what it tells of its prompt)"""


@dataclass(frozen=True, slots=True)
class StepRefused:
    """The plan broke the protocol (a gap, a stale generation, a lost delta). Nothing of it ran.

    Later plans on this stream are refused as well; the scheduler starts over with a hello.
    """

    step_id: int
    """0: the stream is refused, and ends."""
    reason: str
    message: str


WorkerRequest = WorkerHello | StepPlan
WorkerReply = WorkerReady | StepResult | StepRefused
