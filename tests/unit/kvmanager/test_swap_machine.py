"""As the pool's machine, with host memory: swaps in and out, prefixes that sink and come back, at any moment."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from octavo.common.messages.kv import (
    Admitted,
    BlockCopy,
    KvReply,
    OpenPool,
    SwapIn,
    SwapOut,
    Transfer,
    TransferDirection,
    Verdict,
)
from octavo.kvmanager.host_tier import HostTierSettings
from octavo.kvmanager.inspection import stored_blocks
from octavo.kvmanager.pool import PoolSettings
from octavo.kvmanager.pool_events import EventKind, PoolEvent, Tier
from octavo.kvmanager.transfers import Purpose
from support.pool_machine import BLOCK_SIZE, Content, PoolMachine, Row, Sequence

TO_HOST = TransferDirection.TO_HOST


@dataclass
class Moving:
    """A sequence that waits for a transfer: on its way out, or for blocks that are being filled."""

    sequence: Sequence
    transfer_id: int
    is_out: bool


class SwapMachine(PoolMachine):
    """Transfers happen with their step, and are acknowledged at any later message."""

    @initialize(
        num_blocks=st.integers(1, 12) | st.integers(1, 40),
        num_host_blocks=st.integers(1, 40),
        watermark=st.sampled_from([0.0, 0.1]),
        max_sinking_blocks=st.sampled_from([0, 1, 64]),
    )
    def open(  # type: ignore[override]
        self, num_blocks: int, num_host_blocks: int, watermark: float, max_sinking_blocks: int = 64
    ) -> None:
        tier = HostTierSettings(max_sinking_blocks)
        self.begin(
            OpenPool("group-0", 1, 1, num_blocks, BLOCK_SIZE, num_host_blocks), PoolSettings(watermark, host_tier=tier)
        )
        self.pool.blocks.events.watch()
        self.num_told_events = self.pool.blocks.events.last
        self.told: dict[tuple[Tier, bytes], PoolEvent] = {}
        """What a watcher of the pool believes to be stored."""
        self.num_host_blocks = num_host_blocks
        self.host_memory: list[dict[int, Content]] = [{} for _ in range(num_host_blocks)]
        self.chance = Random(num_blocks)

    def begin_scheduler(self) -> None:
        super().begin_scheduler()
        self.transfers: list[Transfer] = []
        self.step_transfers: deque[list[Transfer]] = deque()
        self.done: list[int] = []
        self.asked_out: list[tuple[Sequence, int]] = []
        self.asked_in: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.moving: list[Moving] = []

    # What the scheduler does

    @rule(seed=st.integers(0, 2**32 - 1))
    def swap(self, seed: int) -> None:
        """Some sequences without a step in flight go out, whole or in part, and some swapped ones ask to come back.

        Not one whose fork is still to be copied: the worker has not heard of it, and it has nothing to save.
        """
        chance = Random(seed)
        in_flight = {id(row.sequence) for step in self.queued for row in step.rows}
        uncopied = {change.target_id for change in self.changes if isinstance(change, BlockCopy)}
        for sequence in list(self.live.values()):
            spent = {sequence_id for sequence_id, _ in self.spent}
            if id(sequence) in in_flight or sequence.sequence_id in spent or chance.random() < 0.5:
                continue
            if not uncopied.isdisjoint(sequence.blocks):
                continue
            self.asked_out.append((sequence, chance.choice([0, 0, chance.randint(0, len(sequence.blocks))])))
        if chance.random() < 0.7:
            self.asked_in = [sequence for sequence in self.swapped if chance.random() < 0.7]
        self.send([], [], [], chance.randint(0, 4))

    @precondition(lambda self: self.swapped or self.moving)
    @rule(seed=st.integers(0, 2**32 - 1))
    def abort_one_that_does_not_run(self, seed: int) -> None:
        """Swapped, on its way out, or on its way back."""
        chance = Random(seed)
        gone = chance.choice([*self.swapped, *(one.sequence for one in self.moving)])
        self.swapped = [one for one in self.swapped if one is not gone]
        self.moving = [one for one in self.moving if one.sequence is not gone]
        self.live[gone.sequence_id] = gone  # let_go takes it out
        self.send([], [gone], [], 2)

    @precondition(lambda self: self.queued)
    @rule()
    def finish_step(self) -> None:
        step, transfers = self.queued[0], self.step_transfers.popleft()
        for transfer in transfers:
            if transfer.direction is TO_HOST:
                for block_id, host_id in zip(transfer.device_ids, transfer.host_ids, strict=True):
                    self.host_memory[host_id] = dict(self.memory[block_id])
        self.queued[0].rows, rows = [], step.rows
        super().finish_step()
        for transfer in transfers:
            if transfer.direction is not TO_HOST:
                for block_id, host_id in zip(transfer.device_ids, transfer.host_ids, strict=True):
                    self.memory[block_id] = dict(self.host_memory[host_id])
        self.done += [transfer.transfer_id for transfer in transfers]
        for row in rows:
            self.execute(row)

    @invariant()
    def a_watcher_knows_what_is_stored(self) -> None:
        events = self.pool.blocks.events.after(self.num_told_events, 10_000)
        assert events is not None
        self.num_told_events += len(events)
        for event in events:
            place = event.tier, event.digest
            if event.kind in (EventKind.STORED, EventKind.RESTORED):
                assert place not in self.told
                self.told[place] = event._replace(kind=EventKind.STORED)
            else:
                assert self.told.pop(place).block_id == event.block_id
        assert sorted(self.told.values()) == sorted(stored_blocks(self.pool))

    # Its parts

    def enqueue(self, rows: list[Row | None]) -> None:
        super().enqueue(rows)
        self.step_transfers.append(self.transfers)
        self.transfers = []

    def swap_fields(self, releases: list[Sequence]) -> dict[str, Any]:
        finished = [one for one in self.done if self.chance.random() < 0.6]
        self.done = [one for one in self.done if one not in finished]
        for one in [one for one in self.moving if one.transfer_id in finished]:
            self.moving.remove(one)
            if one.is_out:
                self.swapped.append(one.sequence)
            else:
                self.arrive(one.sequence)
        self.asked_out = [(one, kept) for one, kept in self.asked_out if one not in releases]
        return {
            "finished_transfers": finished,
            "swap_outs": [SwapOut(one.sequence_id, kept, self.launched) for one, kept in self.asked_out],
            "swap_ins": [SwapIn(one.sequence_id, len(one.tokens) + 1) for one in self.asked_in],
        }

    def arrive(self, sequence: Sequence) -> None:
        """It may run: all that it has computed must be in its blocks."""
        for position in range(sequence.num_computed):
            block = self.memory[sequence.blocks[position // BLOCK_SIZE]]
            assert block[position % BLOCK_SIZE] == sequence.content(position), "not what was saved"
        self.live[sequence.sequence_id] = sequence

    def take_transfers(self, reply: KvReply) -> None:
        self.transfers += reply.transfers
        for (sequence, num_kept), answer in zip(self.asked_out, reply.swapped_out, strict=True):
            assert answer.sequence_id == sequence.sequence_id
            if answer.verdict is not Verdict.OK:
                continue
            del self.live[sequence.sequence_id]
            for block_id in sequence.blocks[num_kept:]:
                self.fences[block_id] = max(self.fences[block_id], self.launched)
            sequence.blocks = sequence.blocks[:num_kept]
            if answer.transfer_id:
                self.moving.append(Moving(sequence, answer.transfer_id, is_out=True))
            else:
                self.swapped.append(sequence)
        self.asked_out = []
        seen_later = False
        for sequence, swapped_in in zip(self.asked_in, reply.swapped_in, strict=True):
            if swapped_in.verdict is not Verdict.OK:
                seen_later = True
                continue
            assert not seen_later
            self.swapped.remove(sequence)
            assert len(swapped_in.block_ids) * BLOCK_SIZE > len(sequence.tokens), "no room for one more step"
            for block_id, generation in zip(swapped_in.block_ids, swapped_in.generations, strict=True):
                if generation != self.generations[block_id]:
                    self.hand_out(block_id, generation)
            sequence.blocks = list(swapped_in.block_ids)
            if swapped_in.transfer_id:
                self.moving.append(Moving(sequence, swapped_in.transfer_id, is_out=False))
            else:
                self.arrive(sequence)
        self.asked_in = []

    def take_table(self, sequence: Sequence, answer: Admitted) -> None:
        if not answer.transfer_id:
            super().take_table(sequence, answer)
            return
        num_cached = answer.num_cached_tokens
        assert 0 < answer.num_host_tokens <= num_cached < len(sequence.tokens)
        for block_id, generation in zip(answer.block_ids, answer.generations, strict=True):
            if generation != self.generations[block_id]:
                self.hand_out(block_id, generation)
        sequence.blocks = list(answer.block_ids)
        sequence.num_scheduled = sequence.num_computed = sequence.num_published = num_cached
        sequence.num_told = len(sequence.tokens)
        self.moving.append(Moving(sequence, answer.transfer_id, is_out=False))

    def hand_out(self, block_id: int, generation: int) -> None:
        super().hand_out(block_id, generation)
        others = [*self.swapped, *(one.sequence for one in self.moving)]
        assert all(block_id not in sequence.blocks for sequence in others)
        for transfer in self.pool.tier.transfers:
            is_own_target = self.generations[block_id] == generation and transfer.purpose in (
                Purpose.SINK,
                Purpose.SWAP_IN,
                Purpose.RESTORE,
            )
            assert block_id not in transfer.device_ids or is_own_target, "a block is still being copied"

    def counts_of_host(self) -> tuple[int, int, int]:
        counts = self.pool.counts()
        return counts.host_free, counts.host_swapped, counts.host_cached

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for sequence in [*self.swapped, *(one.sequence for one in self.moving)]:
            self.live[sequence.sequence_id] = sequence
        self.swapped, self.moving, self.waiting = [], [], []
        self.send([], list(self.live.values()), self.credits[:], 0)
        for _ in range(60):
            self.launched += 1
            self.enqueue([])
            while self.queued:
                self.finish_step()
            self.send([], [], [], 0)
        assert not list(self.pool.tier.transfers)
        assert sum(self.counts_of_host()) == self.num_host_blocks
        assert self.pool.counts().host_swapped == self.pool.counts().transferring == 0
        super().teardown()


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=60, stateful_step_count=50)


@pytest.mark.parametrize("seed", range(20))
def test_a_long_busy_life_with_host_memory(seed: int) -> None:
    run_long_life(seed)


def run_long_life(seed: int) -> None:
    chance = Random(seed)
    machine = SwapMachine()
    machine.open(num_blocks=chance.randint(4, 40), num_host_blocks=chance.randint(1, 40), watermark=0.0)
    prefix = [0] * chance.randint(4, 40)
    for _ in range(300):
        if len(machine.waiting) < 3 and chance.random() < 0.6:
            own = [chance.randint(0, 1) for _ in range(chance.randint(0, 6))]
            machine.submit(prompt=prefix[: chance.randint(1, len(prefix))] + own, salt=chance.choice([b"", b"", b"b"]))
        machine.exchange(seed=chance.getrandbits(32), credit_target=chance.randint(0, 6), returns=chance.random() < 0.1)
        machine.launch(seed=chance.getrandbits(32))
        if chance.random() < 0.5:
            machine.swap(seed=chance.getrandbits(32))
        if (machine.swapped or machine.moving) and chance.random() < 0.1:
            machine.abort_one_that_does_not_run(seed=chance.getrandbits(32))
        while len(machine.queued) > chance.choice([0, 1, 1, 2]):
            machine.finish_step()
        if chance.random() < 0.02:
            machine.replace_scheduler(seed=chance.getrandbits(32))
        machine.the_ledger_holds()
    machine.teardown()
