"""Requests and their sequences: every counter of one sequence."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.common.messages.generation import SamplingParams

if TYPE_CHECKING:
    from octavo.scheduler.beams import Beams
    from octavo.scheduler.decode_rows import DecodeRows

_MASK_64 = 2**64 - 1
_GOLDEN_64 = 0x9E3779B97F4A7C15


def choice_seed(seed: int, choice_index: int) -> int:
    """Seed of one choice, uint64: choice 0 has the request's own (the increment is splitmix64's)."""
    return (seed + choice_index * _GOLDEN_64) & _MASK_64


@dataclass(eq=False, slots=True)
class Request:
    """What a gateway asked for. Lives until its last choice has ended."""

    gateway_id: int
    request_no: int
    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    salt: bytes
    num_shared_tokens: int = 0
    """Leading prompt tokens that came from the branch point."""
    priority: int = 0
    """Lower is served first, and preempted last."""
    live: dict[int, Sequence | None] = field(default_factory=dict)
    """Choices that have not ended -> their sequence; None before the prompt's last row has drawn for it."""
    leader: Sequence = field(init=False)
    """Computes the prompt, and is choice 0 after it. Gone once the request has ended, so that none of its objects waits
    for the collector of cycles."""
    has_fanned_out: bool = False
    """Every choice has a sequence of its own: there is one choice, or the prompt's last row has been sampled."""
    ending_ids: frozenset[int] = frozenset()
    """Tokens that end a choice."""
    max_len: int = 0
    """Prompt and output tokens at which a choice ends."""
    has_started: bool = False
    """The gateway has been told that the prompt has its blocks."""
    num_told_prompt_tokens: int = 1
    """Leading prompt tokens whose log-probabilities the gateway has, if it wants any; the first has none."""
    beams: Beams | None = None
    """Set for a beam search. Its sequences are there, and no choice has one."""
    tenant: str = ""
    """Whose it is, as the gateway knows it."""
    weight: int = 1
    """Of the tenant."""
    turn: float = 0.0
    """The first choice's, in fairness beside other tenants (`turns.py`)."""
    keep_s: float = 0.0
    """Seconds for which choices can be branched from after their end."""
    traceparent: str = ""
    """Context for spans of it; empty if it is not traced."""

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Every position of the prompt has to be computed, whatever is cached."""
        return self.params.num_prompt_logprobs is not None and self.num_told_prompt_tokens < self.num_prompt_tokens

    @property
    def sequences(self) -> set[Sequence]:
        """All that are alive."""
        found = {sequence for sequence in self.live.values() if sequence is not None}
        if self.beams is not None:
            found.update(self.beams.sequences)
        elif not self.has_fanned_out:
            found.add(self.leader)
        return found


class SequenceState(enum.Enum):
    """Where a sequence is.

    WAITING -> ADMITTING -> RUNNING -> FINISHED
       ^        |  |  |      ^ ^  |
       |        |  |  |      | |  +-> LEAVING -> WAITING       (preempted, computed again)
       |<-LATER-+  |  |      | |         |
       |           |  |      | |         v
       |           |  |      | |    SWAPPING_OUT -> SWAPPED    (preempted, saved in host memory)
       |           |  |      | |         | full     |  ^
       |           |  |      | |         v          v  | LATER
       |           |  +------|-|----> WAITING   SWAPPING_IN    (from ADMITTING if host memory holds a prefix)
       |           v         | |                    |
       +-- LATER - FORKING --+ +--------------------+          (choices 1 to n - 1, beams and branches)

    A SWAPPED sequence whose deadline has passed, or that is in the way, goes to WAITING.

    A choice that is kept goes from RUNNING to KEPT, and to FINISHED when its blocks are wanted. A beam that has its
    result, and is preempted before its search has decided, goes to PARKED, and to WAITING once it is to go on.
    """

    WAITING = enum.auto()  # in the queue, holds no blocks
    ADMITTING = enum.auto()  # has asked the KV manager for its blocks, holds a slot
    FORKING = enum.auto()  # has asked the KV manager to share its parent's blocks, holds a slot
    RUNNING = enum.auto()  # has blocks and a slot
    LEAVING = enum.auto()  # preempted; gives up its blocks once its steps in flight are back
    SWAPPING_OUT = enum.auto()  # its blocks are being copied to host memory
    SWAPPED = enum.auto()  # in host memory, wholly or from some block on; holds no slot
    SWAPPING_IN = enum.auto()  # has asked for blocks that host memory fills, or waits for the copy; holds a slot
    PARKED = enum.auto()  # a beam that needs no blocks before its search decides, and holds none
    KEPT = enum.auto()  # has ended; holds blocks and no slot
    FINISHED = enum.auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One growing row of tokens.

    token_ids           | prompt ........ | outputs that have come back |
    num_computed_tokens | results are here          |
    num_launched_tokens | steps launched                            |
    num_tokens_ahead      len(token_ids) + num_pending_samples          |
    """

    sequence_id: int
    request: Request
    choice_index: int
    _token_ids: list[int]
    state: SequenceState = SequenceState.WAITING
    is_aborted: bool = False
    """To be dropped as soon as the KV manager has answered (or, before the fan-out, when the prompt is done)."""

    slot: int = -1
    is_open: bool = False
    """The worker has been told that the slot is this sequence's."""
    block_table: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    num_given_blocks: int = 0
    """Leading blocks of the table that came with its admission or fork; later ones were credits."""

    _num_computed_tokens: int = 0
    num_launched_tokens: int = 0
    num_pending_samples: int = 0
    num_steps_in_flight: int = 0
    num_told_tokens: int = 0
    """Leading tokens that the KV manager knows."""
    num_published_blocks: int = 0
    num_preemptions: int = 0
    num_tokens_at_start: int = 0
    """Tokens when it last came to run; with the present number it tells the progress since."""
    left_at: float = 0.0
    """When it was swapped."""
    num_shared_tokens: int = 0
    """While FORKING: the positions that it asked to share."""
    decodes: DecodeRows | None = None
    """Plans its rows and keeps its latest tokens, while it does nothing but decode."""
    row: int = -1
    """Its place in there."""
    num_settled_launches: int = 0
    """Launches of `decodes` whose tokens are in `token_ids`."""
    is_host_fed: bool = False
    """Its next input is chosen here, from the result: no row is planned while a sample is on its way."""
    awaits_token: bool = True
    """It has given no token since it was new or got its blocks anew."""

    turn: float = field(init=False)
    """Its place among those of equal priority."""
    priority: int = 0
    """The request's, or the lowest of those that wait for this sequence. Lower is served first."""
    has_arrived: bool = False
    """The KV manager knows, or is about to be told, the tokens of the sequence, which holds no blocks."""
    is_tentative: bool = False
    """It had to wait for its hashes or for its leader, may have to again, and so must not keep others from asking."""
    leader_id: int = 0
    """The sequence that computes its next block, while it waits for that; else 0."""
    flight_deadline: float = 0.0
    """When it waits no more for its leader."""
    computes_itself: bool = False
    """It has waited for others long enough."""
    last_publication_no: int = 0
    """Of its last publication."""
    asked_at_publication_no: int = 0
    """Last publication of anybody when it asked for blocks."""

    def __post_init__(self) -> None:
        self.turn = self.request.turn + self.choice_index / self.request.weight
        self.priority = self.request.priority

    @property
    def token_ids(self) -> list[int]:
        if self.decodes is not None and self.num_settled_launches < self.decodes.num_arrived:
            self.decodes.settle(self)
        return self._token_ids

    @property
    def num_computed_tokens(self) -> int:
        if self.decodes is not None and self.num_settled_launches < self.decodes.num_arrived:
            self.decodes.settle(self)
        return self._num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, number: int) -> None:
        self._num_computed_tokens = number

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens, and those that are computed, without settling anything."""
        decodes = self.decodes
        num_unsettled = 0 if decodes is None else max(0, decodes.num_arrived - self.num_settled_launches)
        return len(self._token_ids) + num_unsettled, self._num_computed_tokens + num_unsettled

    def take_tokens(self, token_ids: list[int], num_settled_launches: int) -> None:
        """Rows of one position each have brought these."""
        self.num_settled_launches = num_settled_launches
        self._token_ids += token_ids
        self._num_computed_tokens += len(token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens sampled since it last came to run."""
        return len(self.token_ids) - self.num_tokens_at_start

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_tokens_ahead(self) -> int:
        """Length of the sequence once all samples in flight are back."""
        return len(self.token_ids) + self.num_pending_samples

    @property
    def num_tokens_to_launch(self) -> int:
        """Positions that could be computed next; 1 is a decode."""
        return len(self.token_ids) + self.num_pending_samples - self.num_launched_tokens

    def lacks_block(self, block_size: int) -> bool:
        """It could be decoded if its table had one more block."""
        return (
            self.state is SequenceState.RUNNING
            and self.num_launched_tokens >= len(self.block_table) * block_size
            and self.num_tokens_ahead < self.request.max_len
        )

    def cut_output(self, num_output_tokens: int) -> None:
        """Forget what was sampled after so many output tokens. The sequence gets no further row."""
        del self.token_ids[self.request.num_prompt_tokens + num_output_tokens :]
        self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids))

    def undo_sample(self) -> int:
        """The sample that is back could not be drawn: its row is launched again. Returns the positions that count.

        No later row of the sequence is on its way.
        """
        self.num_pending_samples -= 1
        self.num_launched_tokens -= 1
        return self.num_launched_tokens

    @property
    def seeds(self) -> tuple[int, ...]:
        """The sequence's own seed first, then those of the choices that it still draws for."""
        params = self.request.params
        last = self.choice_index + 1 if self.request.has_fanned_out else params.n
        return tuple(choice_seed(params.seed, choice) for choice in range(self.choice_index, last))

    def take_table(self, block_ids: tuple[int, ...], generations: tuple[int, ...], num_computed_tokens: int) -> None:
        """The KV manager has given a table in which `num_computed_tokens` positions are filled."""
        self.block_table, self.generations = list(block_ids), list(generations)
        self.num_sent_blocks = 0
        self.num_given_blocks = len(block_ids)
        self.is_open = False
        self.num_computed_tokens = self.num_launched_tokens = num_computed_tokens
        self.num_tokens_at_start = len(self.token_ids)
        self.state = SequenceState.RUNNING
        self.has_arrived = self.is_tentative = self.computes_itself = False

    def leave_device(self, num_kept_blocks: int, now: float) -> None:
        """The slot and all blocks but the leading `num_kept_blocks` are gone, what they held is kept."""
        self.block_table, self.generations = self.block_table[:num_kept_blocks], self.generations[:num_kept_blocks]
        self.num_given_blocks = min(self.num_given_blocks, num_kept_blocks)
        self.num_sent_blocks = 0
        self.is_open = False
        self.slot = -1
        self.left_at = now
        self.state = SequenceState.SWAPPING_OUT

    def return_to_device(self, block_ids: tuple[int, ...], generations: tuple[int, ...]) -> None:
        """A table that holds, or is about to hold, all that was computed before."""
        self.block_table, self.generations = list(block_ids), list(generations)
        self.num_given_blocks = len(block_ids)
        self.num_tokens_at_start = len(self.token_ids)
        self.awaits_token = True

    def drop_table(self) -> None:
        """Blocks and slot are gone; tokens stay."""
        self.block_table, self.generations = [], []
        self.num_sent_blocks = self.num_published_blocks = self.num_told_tokens = 0
        self.num_computed_tokens = self.num_launched_tokens = self.num_pending_samples = 0
        self.num_steps_in_flight = 0
        self.is_open = False
        self.awaits_token = True
        self.slot = -1
