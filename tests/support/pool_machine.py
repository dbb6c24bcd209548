"""A scheduler's life around one pool, in which every block's content must stay its owner's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.common.messages.kv import (
    Admission,
    Admitted,
    Arrival,
    BlockCopy,
    Fork,
    Forked,
    KvReply,
    KvRequest,
    OpenPool,
    Publication,
    Release,
    Verdict,
    WaitReason,
)
from octavo.kvmanager.flush import FlushScope
from octavo.kvmanager.ledger import violations
from octavo.kvmanager.pool import Pool, PoolSettings

BLOCK_SIZE = 4

seeds = st.integers(0, 2**32 - 1)

Content = tuple[bytes, tuple[int, ...]]
"""What K and V of a position depend on: the salt and all tokens up to it."""


@dataclass
class Sequence:
    """A sequence as the scheduler sees it."""

    sequence_id: int
    tokens: list[int]
    salt: bytes
    blocks: list[int] = field(default_factory=list)
    num_scheduled: int = 0
    """Positions in launched steps, or found in the cache."""
    num_computed: int = 0
    """Positions in acknowledged steps, or found in the cache."""
    num_told: int = 0
    """Tokens that the manager knows."""
    num_published: int = 0
    has_arrived: bool = False

    def content(self, position: int) -> Content:
        return self.salt, tuple(self.tokens[: position + 1])


@dataclass
class Row:
    """Positions of a sequence in a launched step, with the table as it was sent."""

    sequence: Sequence
    blocks: list[int]
    start: int
    contents: list[Content]
    """Of positions 0 to the end of the row."""


@dataclass
class Step:
    """A launched step: what happened to blocks since the last one, then rows."""

    changes: list[BlockCopy | int]
    """Copies, and blocks that became someone's new one and hold nothing of worth."""
    rows: list[Row]


class PoolMachine(RuleBasedStateMachine):
    """A scheduler and an in-order worker around one pool. Memory is followed position by position."""

    @initialize(num_blocks=st.integers(1, 12) | st.integers(1, 64), watermark=st.sampled_from([0.0, 0.1, 0.5]))
    def open(self, num_blocks: int, watermark: float) -> None:
        self.begin(OpenPool("group-0", 1, 1, num_blocks, BLOCK_SIZE), PoolSettings(watermark))

    def begin(self, opening: OpenPool, settings: PoolSettings) -> None:
        """A fresh pool, and its scheduler."""
        self.opening, self.settings = opening, settings
        self.pool = Pool(opening, settings)
        self.num_blocks = opening.num_blocks
        self.memory: list[dict[int, Content]] = [{} for _ in range(self.num_blocks)]
        self.generations = [0] * self.num_blocks
        self.begin_scheduler()

    def begin_scheduler(self) -> None:
        """One that knows of nothing."""
        self.message_no = 0
        self.next_id = 1
        self.launched = 0
        self.acknowledged = 0
        self.queued: deque[Step] = deque()
        self.fences = [0] * self.num_blocks
        self.live: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.credits: list[int] = []
        self.spent: list[tuple[int, int]] = []
        self.changes: list[BlockCopy | int] = []
        self.abandoned: list[int] = []
        """Sequences that have arrived and will not be asked for."""
        self.unfindable: set[int] = set()
        """Live sequences that were there at a flush."""

    # What the scheduler does

    @precondition(lambda self: len(self.waiting) < 4)
    @rule(
        prompt=st.integers(1, 40).map(lambda length: [0] * length)
        | st.lists(st.integers(0, 1), min_size=1, max_size=20),
        salt=st.sampled_from([b"", b"", b"", b"tenant"]),
    )
    def submit(self, prompt: list[int], salt: bytes) -> None:
        self.waiting.append(Sequence(self.next_id, prompt, salt))
        self.next_id += 1

    @precondition(lambda self: self.waiting)
    @rule(seed=seeds)
    def abandon(self, seed: int) -> None:
        """A client leaves before its prompt has blocks."""
        gone = self.waiting.pop(Random(seed).randrange(len(self.waiting)))
        if gone.has_arrived:
            self.abandoned.append(gone.sequence_id)

    @rule(scope=st.sampled_from([FlushScope(), FlushScope(salt=b"tenant"), FlushScope(salt=b"")]))
    def flush(self, scope: FlushScope) -> None:
        matches = scope.matcher()
        self.pool.flush(scope)
        assert not any(map(matches, self.pool.blocks.key_to_block))
        self.unfindable |= {one.sequence_id for one in self.live.values() if scope.salt in (None, one.salt)}

    @rule(seed=seeds, credit_target=st.integers(0, 6), returns=st.booleans())
    def exchange(self, seed: int, credit_target: int, returns: bool) -> None:
        """One message with everything that came up, and some releases, preemptions and forks."""
        chance = Random(seed)
        releases = [sequence for sequence in self.live.values() if chance.random() < 0.3]
        parents = [sequence for sequence in self.live.values() if sequence.num_scheduled and chance.random() < 0.2]
        forks = [
            Fork(parent.sequence_id, self.next_id + index, chance.randint(1, parent.num_scheduled))
            for index, parent in enumerate(parents)
        ]
        self.next_id += len(forks)
        preempted = [sequence for sequence in releases if chance.random() < 0.5]
        self.waiting += [Sequence(gone.sequence_id, gone.tokens[:], gone.salt) for gone in preempted]
        self.send(forks, releases, self.credits[:] if returns else [], credit_target)

    @rule(seed=seeds)
    def launch(self, seed: int) -> None:
        """A step with a chunk of some sequences; those that have no block for their next token sit out."""
        self.launched += 1
        chance = Random(seed)
        chosen = [sequence for sequence in self.live.values() if chance.random() < 0.8]
        rows = [self.row(sequence, chance.choice([3, 8, 40]), chance.randint(0, 1)) for sequence in chosen]
        self.enqueue(rows)

    @precondition(lambda self: self.live or self.waiting)
    @rule(token=st.integers(0, 1), credit_target=st.integers(0, 6))
    def run(self, token: int, credit_target: int) -> None:
        """A step of everything there is to compute, its result, and its message."""
        self.launched += 1
        self.enqueue([self.row(sequence, 1000, token) for sequence in self.live.values()])
        while self.queued:
            self.finish_step()
        self.send([], [], [], credit_target)

    @precondition(lambda self: self.queued)
    @rule()
    def finish_step(self) -> None:
        step = self.queued.popleft()
        for change in step.changes:
            if isinstance(change, BlockCopy):
                self.memory[change.target_id] = dict(self.memory[change.source_id])
            else:
                self.memory[change] = {}
        for row in step.rows:
            self.execute(row)
        self.acknowledged += 1

    @precondition(lambda self: self.launched > 5)
    @rule(seed=seeds)
    def replace_scheduler(self, seed: int) -> None:
        """It dies. The worker ends some of its steps and drops the others; then the next one takes the pool over."""
        for _ in range(Random(seed).randint(0, len(self.queued))):
            self.finish_step()
        num_published = len(self.pool.blocks.key_to_block)
        self.pool = Pool(self.opening, self.settings, cached=self.pool.let_go())
        assert self.counts.cached == num_published
        assert self.counts.cached + self.counts.free == self.num_blocks
        self.begin_scheduler()

    # Its parts

    def enqueue(self, rows: list[Row | None]) -> None:
        self.queued.append(Step(self.changes, [row for row in rows if row is not None]))
        self.changes = []

    def row(self, sequence: Sequence, max_tokens: int, next_token: int) -> Row | None:
        """At most `max_tokens` positions; one more than the tokens there are, if all were computed before."""
        if sequence.num_scheduled == len(sequence.tokens):
            sequence.tokens.append(next_token)
        if sequence.num_scheduled // BLOCK_SIZE == len(sequence.blocks):
            if not self.credits:
                return None
            credit = self.credits.pop()
            sequence.blocks.append(credit)
            self.spent.append((sequence.sequence_id, credit))
        room = len(sequence.blocks) * BLOCK_SIZE
        start = sequence.num_scheduled
        end = min(start + max_tokens, room, len(sequence.tokens))
        for index in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
            holders = [other for other in self.live.values() if sequence.blocks[index] in other.blocks]
            assert holders == [sequence], "a sequence writes only blocks it alone holds"
        sequence.num_scheduled = end
        return Row(sequence, sequence.blocks[:], start, [sequence.content(position) for position in range(end)])

    def execute(self, row: Row) -> None:
        """Write the row's positions, and read all before them: they must hold the sequence's own prefix."""
        for position, content in enumerate(row.contents):
            block = self.memory[row.blocks[position // BLOCK_SIZE]]
            if position < row.start:
                assert block[position % BLOCK_SIZE] == content
            else:
                block[position % BLOCK_SIZE] = content
        row.sequence.num_computed = max(row.sequence.num_computed, len(row.contents))

    def send(
        self, forks: list[Fork], releases: list[Sequence], returned_credits: list[int], credit_target: int
    ) -> KvReply:
        self.message_no += 1
        publications = [self.publication(sequence) for sequence in self.live.values()]
        request = KvRequest(
            message_no=self.message_no,
            acknowledged_step=self.acknowledged,
            spent=self.spent,
            publications=[publication for publication in publications if publication is not None],
            forks=forks,
            releases=[
                *(Release(sequence.sequence_id, self.launched) for sequence in releases),
                *(Release(sequence_id, 0) for sequence_id in self.abandoned),
            ],
            returned_credits=returned_credits,
            admissions=[self.admission(one) for one in self.waiting],
            credit_target=credit_target,
            arrivals=[Arrival(one.sequence_id, one.tokens, one.salt) for one in self.waiting if self.arrives_now(one)],
            **self.swap_fields(releases),
        )
        reply = self.pool.apply(request)
        self.take_transfers(reply)
        self.spent, self.abandoned = [], []
        parents = dict(self.live)
        self.let_go(releases)
        self.credits = [credit for credit in self.credits if credit not in returned_credits]
        for fork, forked in zip(forks, reply.forked, strict=True):
            self.take_fork(parents[fork.parent_id], fork, forked)
        self.take_admissions(reply.admitted)
        self.take_credits(reply, credit_target)
        return reply

    def arrives_now(self, sequence: Sequence) -> bool:
        """Two of three tell their tokens by an arrival."""
        if sequence.has_arrived or sequence.sequence_id % 3 == 0:
            return False
        sequence.has_arrived = True
        return True

    def admission(self, sequence: Sequence) -> Admission:
        computes_itself = Random(self.message_no).random() < 0.3
        if sequence.sequence_id % 3:
            return Admission(sequence.sequence_id, computes_itself=computes_itself)
        return Admission(sequence.sequence_id, tuple(sequence.tokens), sequence.salt, computes_itself)

    def swap_fields(self, releases: list[Sequence]) -> dict[str, Any]:
        """What else the message says; nothing without host memory."""
        return {}

    def take_transfers(self, reply: KvReply) -> None:
        assert reply.transfers == []

    def publication(self, sequence: Sequence) -> Publication | None:
        num_full = sequence.num_computed // BLOCK_SIZE * BLOCK_SIZE
        if num_full <= sequence.num_published:
            return None
        new_token_ids = tuple(sequence.tokens[sequence.num_told : num_full])
        sequence.num_published = num_full
        sequence.num_told = max(sequence.num_told, num_full)
        return Publication(sequence.sequence_id, sequence.num_computed, new_token_ids)

    def let_go(self, releases: list[Sequence]) -> None:
        for sequence in releases:
            del self.live[sequence.sequence_id]
            self.unfindable.discard(sequence.sequence_id)
            for block_id in sequence.blocks:
                self.fences[block_id] = max(self.fences[block_id], self.launched)

    def take_fork(self, parent: Sequence, fork: Fork, forked: Forked) -> None:
        assert forked.child_id == fork.child_id
        if forked.verdict is Verdict.LATER:
            return
        num_full = fork.num_tokens // BLOCK_SIZE
        assert list(forked.block_ids[:num_full]) == parent.blocks[:num_full]
        assert (forked.copy is not None) == (fork.num_tokens % BLOCK_SIZE != 0)
        if forked.copy is not None:
            assert forked.copy.source_id == parent.blocks[num_full]
            assert forked.copy.target_id == forked.block_ids[num_full]
            assert forked.copy.target_generation == forked.generations[num_full]
            self.hand_out(forked.block_ids[num_full], forked.generations[num_full])
            self.changes.append(forked.copy)
        child = Sequence(
            fork.child_id,
            parent.tokens[: fork.num_tokens],
            parent.salt,
            blocks=list(forked.block_ids),
            num_scheduled=fork.num_tokens,
            num_computed=min(parent.num_computed, fork.num_tokens),
            num_told=min(parent.num_told, fork.num_tokens),
            num_published=min(parent.num_published, num_full * BLOCK_SIZE),
        )
        self.live[child.sequence_id] = child

    def take_admissions(self, answers: list[Admitted]) -> None:
        seen_later = False
        asked, self.waiting = self.waiting, []
        for sequence, answer in zip(asked, answers, strict=True):
            assert answer.sequence_id == sequence.sequence_id
            is_too_large = -(-len(sequence.tokens) // BLOCK_SIZE) > self.num_blocks
            assert (answer.verdict is Verdict.NEVER) == is_too_large
            if answer.verdict is Verdict.OK:
                assert not seen_later
                self.take_table(sequence, answer)
            elif answer.verdict is Verdict.LATER:
                seen_later |= answer.wait_reason in (WaitReason.NO_BLOCKS, WaitReason.BEHIND_ANOTHER)
                if answer.wait_reason is WaitReason.IN_FLIGHT:
                    leader = self.live[answer.awaited_sequence_id]
                    assert leader.salt == sequence.salt
                    assert leader.tokens[:BLOCK_SIZE] == sequence.tokens[:BLOCK_SIZE]
                    assert leader.num_computed < len(leader.tokens)
                self.waiting.append(sequence)

    def take_table(self, sequence: Sequence, answer: Admitted) -> None:
        num_hits, rest = divmod(answer.num_cached_tokens, BLOCK_SIZE)
        assert rest == 0
        assert answer.num_cached_tokens < len(sequence.tokens)
        assert num_hits + sum(miss.num_blocks for miss in answer.misses) == len(sequence.tokens) // BLOCK_SIZE
        assert len(answer.block_ids) == -(-len(sequence.tokens) // BLOCK_SIZE)
        for position in range(answer.num_cached_tokens):
            block_id = answer.block_ids[position // BLOCK_SIZE]
            assert self.memory[block_id][position % BLOCK_SIZE] == sequence.content(position), "a foreign hit"
        for index, (block_id, generation) in enumerate(zip(answer.block_ids, answer.generations, strict=True)):
            if index < num_hits:
                assert generation == self.generations[block_id]
            else:
                self.hand_out(block_id, generation)
        sequence.blocks = list(answer.block_ids)
        sequence.num_scheduled = sequence.num_computed = sequence.num_published = answer.num_cached_tokens
        sequence.num_told = len(sequence.tokens)
        self.live[sequence.sequence_id] = sequence

    def take_credits(self, reply: KvReply, credit_target: int) -> None:
        for block_id, generation in reply.credits:
            self.hand_out(block_id, generation)
            self.credits.append(block_id)
        assert not reply.credits or len(self.credits) <= credit_target
        assert reply.num_recalled_credits <= len(self.credits)
        assert reply.num_recalled_credits >= len(self.credits) - credit_target

    def hand_out(self, block_id: int, generation: int) -> None:
        """A block becomes someone's new one: nobody may hold it, and no step that could touch it may be running."""
        assert self.fences[block_id] <= self.acknowledged
        assert block_id not in self.credits
        assert all(block_id not in sequence.blocks for sequence in self.live.values())
        assert generation == self.generations[block_id] + 1
        self.generations[block_id] = generation
        self.changes.append(block_id)

    # What always holds

    @invariant()
    def the_ledger_holds(self) -> None:
        if hasattr(self, "pool"):
            assert violations(self.pool) == []
            assert sum(getattr(self.counts, name) for name in self.counts.__slots__) == self.num_blocks

    @invariant()
    def what_was_flushed_is_not_published_again(self) -> None:
        if hasattr(self, "pool"):
            for sequence_id in self.unfindable & self.live.keys():
                assert not self.pool.tables.table(sequence_id).is_publishing

    @property
    def counts(self):  # type: ignore[no-untyped-def]
        return self.pool.blocks.counts()

    def teardown(self) -> None:
        """With every sequence gone and every step acknowledged nothing is held, and the whole pool can be had."""
        if not hasattr(self, "pool"):
            return
        self.waiting = []
        while self.queued:
            self.finish_step()
        self.send([], list(self.live.values()), self.credits[:], 0)
        assert (self.counts.active, self.counts.granted, self.counts.quarantined) == (0, 0, 0)
        self.waiting = [Sequence(self.next_id, [0] * (self.num_blocks * BLOCK_SIZE), b"")]
        [answer] = self.send([], [], [], 0).admitted
        assert answer.verdict is Verdict.OK
