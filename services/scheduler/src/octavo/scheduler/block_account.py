"""The scheduler's side of the step protocol with the KV manager: credits in hand, news to tell, answers awaited."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from octavo.common.errors import MessageGapError
from octavo.common.messages.kv import (
    Admission,
    Arrival,
    DeclaredTable,
    DeclarePool,
    Fork,
    KvReply,
    KvRequest,
    PoolCounts,
    Publication,
    Release,
    SwapIn,
    SwapOut,
)
from octavo.scheduler.recycler import Recycler
from octavo.scheduler.sequence import Sequence

MAX_ARRIVAL_TOKENS = 32_768
"""Tokens of arrivals that one message carries, beside those of its admissions; a longer one goes alone."""


class BlockAccount:
    """Collects what the next `KvRequest` has to say, and keeps the credits that replies bring.

    A credit is a block that may be appended to any table without asking. What was spent is told in the first message
    after the launch, before any release that it may belong to.
    """

    def __init__(self, num_blocks: int, block_size: int, highest_generation: int = 0) -> None:
        """`highest_generation`: of the blocks that the worker has seen."""
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.counts = PoolCounts(free=num_blocks, granted=0, active=0, cached=0, quarantined=0)
        """The pool as of the last reply."""
        self.skips_host_prefixes = False
        """Told with admissions: computing prefix blocks costs less than copying them from host memory."""
        self.open_forks: dict[int, Fork] = {}
        """Not answered, by child."""
        self._credits: deque[tuple[int, int]] = deque()
        self._recycler = Recycler()
        self._highest_generation = highest_generation
        self._num_publications = 0
        self._start_counting()

    def _start_counting(self) -> None:
        """Nothing has been said to the KV manager yet, and nothing has happened since it was told all."""
        self._next_message_no = 1
        self._num_replies = 0
        self._told_step = 0
        self._last_giving_no = 0
        """The last message that gave blocks up."""
        self._spent: list[tuple[int, int]] = []
        self._publications: list[Publication] = []
        self._forks: list[Fork] = []
        self._fork_ends: list[tuple[Sequence, Sequence]] = []
        """(parent, child) of each of `_forks`."""
        self._releases: list[Release] = []
        self._returned: list[int] = []
        self._admissions: list[Admission] = []
        self._finished_transfers: list[int] = []
        self._swap_outs: list[SwapOut] = []
        self._swap_ins: list[SwapIn] = []
        self._arrivals: dict[int, Arrival] = {}
        """Not told yet, by sequence."""

    @property
    def is_settled(self) -> bool:
        """Everything that was sent is answered, so `counts` is the pool as it is."""
        return self._num_replies == self._next_message_no - 1 and self._told_step >= 0

    @property
    def is_dry(self) -> bool:
        """No block can be had without taking one from a sequence, and none is on its way back."""
        counts = self.counts
        return (
            self.is_settled
            and not self._credits
            and not self._releases
            and not self._swap_outs
            and not self._finished_transfers
            and counts.free + counts.cached + counts.granted + counts.quarantined + counts.transferring == 0
        )

    @property
    def awaits_blocks(self) -> bool:
        """Blocks are on their way back: they were given up, and cannot be had yet, or nobody has said so."""
        return (
            self._num_replies < self._last_giving_no
            or self._gives_blocks
            or self.counts.quarantined + self.counts.transferring > 0
        )

    @property
    def _gives_blocks(self) -> bool:
        """The next message does."""
        return bool(self._releases or self._returned or self._swap_outs or self._finished_transfers)

    @property
    def is_at_rest(self) -> bool:
        """Every block is in a table or can be handed out, and nothing that was told or is to be told changes that."""
        return self.is_settled and not self.awaits_blocks and not self.counts.granted

    def may_fit_now(self, allocatable_at_later: int) -> bool:
        """Whether an admission that got LATER, when the pool had so many blocks to give, is worth another try.

        Credits that are given back go with the admission that they are for, else they would be granted anew.
        """
        return bool(self._returned) or self.counts.allocatable > allocatable_at_later

    def has_block_for(self, sequence: Sequence, position: int) -> bool:
        """Make sure that the sequence's table covers `position`, with a credit if needed. False: no credit left."""
        if position < len(sequence.block_table) * self.block_size:
            return True
        if not self._credits:
            return False
        block_id, generation = self._credits.popleft()
        sequence.block_table.append(block_id)
        sequence.generations.append(generation)
        self._spent.append((sequence.sequence_id, block_id))
        return True

    def publish(self, sequence: Sequence) -> None:
        """Tell of full blocks that were computed since the last time, with tokens that the manager lacks."""
        num_full = sequence.num_computed_tokens // self.block_size
        if num_full <= sequence.num_published_blocks:
            return
        sequence.num_published_blocks = num_full
        told, end = sequence.num_told_tokens, num_full * self.block_size
        new_tokens = tuple(sequence.token_ids[told:end])
        sequence.num_told_tokens = max(told, end)
        self._publications.append(Publication(sequence.sequence_id, sequence.num_computed_tokens, new_tokens))
        for parent, child in self._fork_ends:  # publications apply before forks, also those that come up after them
            if parent is sequence:
                self._share_told(parent, child)
        self._num_publications += 1
        sequence.last_publication_no = self._num_publications

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """The child shares `num_tokens` positions, and asks for blocks for its other tokens if they are a prompt."""
        child.num_shared_tokens = num_tokens
        num_tokens_left = len(child.token_ids) - num_tokens
        num_table_tokens = len(child.token_ids) if num_tokens_left > 1 else 0
        fork = Fork(parent.sequence_id, child.sequence_id, num_tokens, num_table_tokens)
        self.open_forks[child.sequence_id] = fork
        self.ask_fork(fork, parent, child)

    def ask_fork(self, fork: Fork, parent: Sequence, child: Sequence) -> None:
        """For the first time, or anew of a KV manager that was told all."""
        self._forks.append(fork)
        self._fork_ends.append((parent, child))
        self._share_told(parent, child)

    def _share_told(self, parent: Sequence, child: Sequence) -> None:
        """What the KV manager knows of the parent, it knows of the child, up to the shared tokens."""
        child.num_told_tokens = min(parent.num_told_tokens, child.num_shared_tokens)
        child.num_published_blocks = min(parent.num_published_blocks, child.num_shared_tokens // self.block_size)

    def release(self, sequence: Sequence, last_step: int) -> None:
        """`last_step`: the last step launched so far, which may still write to the sequence's blocks."""
        self._releases.append(Release(sequence.sequence_id, last_step))
        self._recycler.note(sequence, last_step, told_in=self._next_message_no)

    def swap_out(self, sequence: Sequence, num_kept_blocks: int, last_step: int) -> None:
        self._swap_outs.append(SwapOut(sequence.sequence_id, num_kept_blocks, last_step))

    def swap_in(self, sequence: Sequence) -> None:
        """Ask for blocks for all tokens and one more."""
        self._swap_ins.append(SwapIn(sequence.sequence_id, len(sequence.token_ids) + 1))

    def finish_transfer(self, transfer_id: int) -> None:
        self._finished_transfers.append(transfer_id)

    def arrive(self, sequence: Sequence) -> None:
        """The sequence will ask for blocks for the tokens that it has now."""
        if not sequence.has_arrived:
            sequence.has_arrived = True
            self._arrivals[sequence.sequence_id] = Arrival(
                sequence.sequence_id, array("i", sequence.token_ids), sequence.request.salt
            )

    def forget(self, sequence: Sequence) -> None:
        """The sequence will not ask for blocks."""
        if not sequence.has_arrived:
            return
        sequence.has_arrived = False
        if self._arrivals.pop(sequence.sequence_id, None) is None:
            self._releases.append(Release(sequence.sequence_id, last_step=0))

    def admit(
        self, sequence: Sequence, *, computes_itself: bool, num_table_tokens: int = 0, ignores_cache: bool = False
    ) -> None:
        """`computes_itself`: it does not wait for another sequence that computes its next block. `ignores_cache`: it
        gets no block that holds something already.

        `num_table_tokens`: positions to get blocks for at once, if more than its tokens.
        """
        self.arrive(sequence)
        sequence.asked_at_publication_no = self._num_publications
        admission = Admission(
            sequence.sequence_id,
            computes_itself=computes_itself,
            num_table_tokens=num_table_tokens,
            ignores_cache=ignores_cache,
        )
        self._admissions.append(admission)

    def take_request(self, acknowledged_step: int, credit_target: int, *, is_starving: bool) -> KvRequest | None:
        """The next message, or None if there is nothing to say.

        `is_starving`: a decode sits out for want of a credit. If the pool has blocks by now, that is worth a message.
        """
        has_news = (
            (is_starving and self.is_settled and not self._credits and self.counts.allocatable > 0)
            or acknowledged_step > self._told_step
            or self._spent
            or self._publications
            or self._forks
            or self._releases
            or self._returned
            or self._admissions
            or self._finished_transfers
            or self._swap_outs
            or self._swap_ins
            or (self._arrivals and self.is_settled)
        )
        if not has_news:
            return None
        if self._gives_blocks:
            self._last_giving_no = self._next_message_no
        request = KvRequest(
            message_no=self._next_message_no,
            acknowledged_step=acknowledged_step,
            spent=self._spent,
            publications=self._publications,
            forks=self._forks,
            releases=self._releases,
            returned_credits=self._returned,
            admissions=self._admissions,
            credit_target=credit_target,
            finished_transfers=self._finished_transfers,
            swap_outs=self._swap_outs,
            swap_ins=self._swap_ins,
            arrivals=self._take_arrivals(),
            last_reply_no=self._num_replies,
            skips_host_prefixes=self.skips_host_prefixes and bool(self._admissions),
        )
        self._next_message_no += 1
        self._told_step = acknowledged_step
        self._spent, self._publications = [], []
        self._forks, self._fork_ends = [], []
        self._releases, self._returned, self._admissions = [], [], []
        self._finished_transfers, self._swap_outs, self._swap_ins = [], [], []
        return request

    def _take_arrivals(self) -> list[Arrival]:
        """Those that the message's admissions need, then others in order as far as the message may grow."""
        pending = self._arrivals
        arrivals = [pending.pop(one.sequence_id) for one in self._admissions if one.sequence_id in pending]
        num_tokens = 0
        while pending and num_tokens < MAX_ARRIVAL_TOKENS:
            arrival = pending.pop(next(iter(pending)))
            num_tokens += len(arrival.token_ids)
            arrivals.append(arrival)
        return arrivals

    def on_reply(self, reply: KvReply) -> None:
        """Take the credits of a reply, and put aside what it recalls. Raises MessageGapError if one is missing."""
        if reply.message_no != self._num_replies + 1:
            raise MessageGapError(f"reply {reply.message_no} of the KV manager after reply {self._num_replies}")
        self._num_replies = reply.message_no
        self.counts = reply.counts
        self._recycler.taken_back(reply.message_no)
        for forked in reply.forked:
            self.open_forks.pop(forked.child_id, None)
            self._highest_generation = max((self._highest_generation, *forked.generations))
        for _, generation in reply.credits:
            self._highest_generation = max(self._highest_generation, generation)
        for back in reply.swapped_in:
            self._highest_generation = max((self._highest_generation, *back.generations))
        for answer in reply.admitted:
            self._highest_generation = max((self._highest_generation, *answer.generations))
        self._credits.extend(reply.credits)
        for _ in range(min(reply.num_recalled_credits, len(self._credits))):
            self._returned.append(self._credits.pop()[0])

    # While no KV manager is there.

    @property
    def has_recycled(self) -> bool:
        """Blocks were used again without the KV manager, which has to be told by a declaration."""
        return bool(self._recycler.recycled)

    def recycle(self, acknowledged_step: int, running: Iterable[Sequence]) -> int:
        """Make credits of blocks that sequences gave up since the KV manager went away. The number of new credits."""
        made = self._recycler.recycle(acknowledged_step, running, {block_id for block_id, _ in self._credits})
        self._credits.extend(made)
        self._highest_generation = max((self._highest_generation, *(generation for _, generation in made)))
        return len(made)

    def declare(
        self, running: Iterable[Sequence], launched_step: int, acknowledged_step: int, *, publishes: bool
    ) -> DeclarePool:
        """All that a KV manager that knows nothing must be told. News that are in it are dropped, and open forks are to
        be asked anew.

        `running`: the sequences that hold tables. Admissions that were asked for are forgotten. `publishes`: what they
        have computed may be found by others.
        """
        tables = [self._declared(sequence, publishes=publishes) for sequence in running]
        self._recycler.forget()
        self._start_counting()
        self._told_step = -1  # a message follows at once; before its reply, `counts` are those of another manager
        return DeclarePool(
            tables=tables,
            credits=list(self._credits),
            launched_step=launched_step,
            acknowledged_step=acknowledged_step,
            recycled=list(self._recycler.recycled.items()),
            highest_generation=self._highest_generation,
        )

    def _declared(self, sequence: Sequence, *, publishes: bool) -> DeclaredTable:
        num_tokens = min(len(sequence.token_ids), len(sequence.block_table) * self.block_size)
        sequence.num_told_tokens = num_tokens
        sequence.num_published_blocks = sequence.num_computed_tokens // self.block_size
        return DeclaredTable(
            sequence_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids[:num_tokens]),
            num_computed_tokens=sequence.num_computed_tokens if publishes else 0,
            block_ids=tuple(sequence.block_table),
            generations=tuple(sequence.generations),
            salt=sequence.request.salt,
        )
