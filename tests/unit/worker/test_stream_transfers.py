"""Copies on streams of their own, on a model of a GPU whose streams run in any order that the events allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octavo.common.messages.kv import BlockCopy, Transfer, TransferDirection
from octavo.common.messages.step import OpenSlot, StepPlan, TableDelta
from octavo.worker.block_tables import BlockTables
from octavo.worker.block_transfers import BlockTransfers, CpuTransfers
from octavo.worker.stream_transfers import CopyDevice, StreamTransfers, contiguous_runs
from octavo.worker.transfer_check import move_blocks

TO_HOST, TO_DEVICE = TransferDirection.TO_HOST, TransferDirection.TO_DEVICE
NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 5


class FakeEvent:
    """Passed once the stream that recorded it has run so far."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        while not self.is_passed:
            assert self.gpu.run_one(), "the streams wait for one another"

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.is_passed
        assert end.is_passed
        return 0.25


@dataclass(eq=False)
class FakeStream:
    """What it was given and has not run."""

    given: list[tuple[FakeEvent | None, Callable[[], None]]] = field(default_factory=list)

    def run(self, action: Callable[[], None]) -> None:
        self.given.append((None, action))

    def record_event(self, event: FakeEvent) -> FakeEvent:
        self.run(lambda: setattr(event, "is_passed", True))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.given.append((event, lambda: None))


class FakeGpu(CopyDevice):
    """A compute stream and those that were asked for; an order drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.compute = FakeStream()
        self.streams = [self.compute]
        self.random = random.Random(seed)

    def compute_stream(self) -> FakeStream:  # type: ignore[override]
        return self.compute

    def new_stream(self) -> FakeStream:  # type: ignore[override]
        self.streams.append(FakeStream())
        return self.streams[-1]

    def new_event(self, *, timed: bool = True) -> FakeEvent:  # type: ignore[override]
        return FakeEvent(self)

    def copy(self, stream: FakeStream, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:  # type: ignore[override]
        for target, source in pairs:
            stream.run(lambda target=target, source=source: target.copy_(source))

    def run_one(self) -> bool:
        """Let one stream go on by one action, if any can."""
        able = [one for one in self.streams if one.given and (one.given[0][0] is None or one.given[0][0].is_passed)]
        if not able:
            return False
        _, action = self.random.choice(able).given.pop(0)
        action()
        return True

    def run_some(self) -> None:
        for _ in range(self.random.randrange(6)):
            self.run_one()


@dataclass
class Device:
    """A pool of one number a block, its transfers, and how its compute is run."""

    pool: Tensor
    transfers: BlockTransfers
    run: Callable[[Callable[[], None]], None]
    tables: BlockTables = field(default_factory=lambda: BlockTables(NUM_BLOCKS, NUM_BLOCKS, NUM_BLOCKS))

    def launch(self, plan: StepPlan, written: list[int], step: int) -> None:
        """The plan's copies, then a step that reads and writes the blocks of its live rows."""

        def copy(copies: list[BlockCopy]) -> None:
            for one in copies:
                self.run(lambda one=one: self.pool[one.target_id].copy_(self.pool[one.source_id]))

        def compute() -> None:
            for block_id in written:
                self.pool[block_id] = self.pool[block_id] * 3 + step

        self.tables.append_on_host(plan.table_deltas)
        move_blocks(plan, self.transfers, self.tables, copy)
        self.run(compute)


def devices(seed: int) -> tuple[Device, Device, FakeGpu]:
    start = torch.arange(NUM_BLOCKS, dtype=torch.float64)[:, None]
    plain_pool, pool = start.clone(), start.clone()
    gpu = FakeGpu(seed)
    host = torch.zeros((NUM_HOST_BLOCKS, 1), dtype=torch.float64)
    plain = CpuTransfers(plain_pool, NUM_HOST_BLOCKS)
    plain._host.zero_()
    return (
        Device(plain_pool, plain, lambda action: action()),
        Device(pool, StreamTransfers(pool, host, gpu), gpu.compute.run),
        gpu,
    )


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_any_order_of_the_streams_leaves_what_one_after_the_other_would(data: st.DataObject, seed: int) -> None:
    """Plans by the rules of `check_transfers`: what a transfer fills is in no table, what it reads has no writer."""
    expected, device, gpu = devices(seed)
    live: set[int] = set()
    transfer_id = 0
    sent, finished = [], []
    for step in range(1, data.draw(st.integers(1, 7)) + 1):
        live -= data.draw(st.sets(st.sampled_from(sorted(live)))) if live else set()
        free = [block_id for block_id in range(NUM_BLOCKS) if block_id not in live]
        ids = data.draw(st.permutations(free))
        saved = ids[: data.draw(st.integers(0, min(3, len(ids))))]
        filled = data.draw(st.permutations(free))[: data.draw(st.integers(0, min(2, len(free))))]
        targets = [block_id for block_id in free if block_id not in filled]
        given = data.draw(st.sets(st.sampled_from(targets))) if targets else set()
        copies = []
        if targets and data.draw(st.booleans()):
            target = data.draw(st.sampled_from(targets))
            copies.append(BlockCopy(data.draw(st.integers(0, NUM_BLOCKS - 1)), target, 1, 1))
        transfers = []
        for direction, block_ids in ((TO_HOST, saved), (TO_DEVICE, filled)):
            if block_ids:
                transfer_id += 1
                host_ids = data.draw(st.permutations(range(NUM_HOST_BLOCKS)))[: len(block_ids)]
                moved = (tuple(block_ids), (1,) * len(block_ids), tuple(host_ids))
                transfers.append(Transfer(transfer_id, direction, *moved))
                sent.append(transfer_id)
        live |= given
        delta = TableDelta(0, 0, tuple(given), (1,) * len(given))
        plan = StepPlan(
            step, opened_slots=[OpenSlot(0, 0, (0,), 0, 1, 0, None)], table_deltas=[delta], copies=copies,
            transfers=transfers,
        )  # fmt: skip
        for one in (expected, device):
            one.launch(plan, sorted(live), step)
        gpu.run_some()
        if data.draw(st.booleans()):
            finished += device.transfers.finished(wait=data.draw(st.booleans())).transfer_ids
    finished += device.transfers.finished(wait=True).transfer_ids
    while gpu.run_one():
        pass
    assert torch.equal(device.pool, expected.pool)
    assert torch.equal(device.transfers._host, expected.transfers._host)
    assert sorted(finished) == sent, "each transfer is reported once"


def test_launching_waits_for_nothing_and_both_directions_run_beside_each_other() -> None:
    _, device, gpu = devices(seed=0)
    device.transfers.to_host([Transfer(1, TO_HOST, (0, 1), (1, 1), (0, 1))])
    device.transfers.to_device([Transfer(2, TO_DEVICE, (4, 5), (1, 1), (3, 4))])
    assert device.transfers.finished(wait=False).transfer_ids == []
    _, out, back = gpu.streams
    while gpu.compute.given:
        gpu.random.choice([gpu.compute]).given.pop(0)[1]()
    while back.given:
        assert back.given[0][0] is None or back.given[0][0].is_passed, "the copy in waits for the copy out"
        back.given.pop(0)[1]()
    assert out.given
    assert device.transfers.finished(wait=False).transfer_ids == [2]
    ended = device.transfers.finished(wait=True)
    assert (ended.transfer_ids, ended.copy_us) == ([1], 250)


@pytest.mark.parametrize(
    ("targets", "sources", "runs"),
    [
        ((), (), []),
        ((4,), (9,), [(4, 9, 1)]),
        ((4, 5, 6), (9, 10, 11), [(4, 9, 3)]),
        ((4, 5, 6), (9, 10, 12), [(4, 9, 2), (6, 12, 1)]),
        ((4, 6, 7), (9, 10, 11), [(4, 9, 1), (6, 10, 2)]),
        ((5, 4), (1, 0), [(5, 1, 1), (4, 0, 1)]),
    ],
)
def test_blocks_that_lie_together_on_both_sides_are_one_copy(
    targets: tuple[int, ...], sources: tuple[int, ...], runs: list[tuple[int, int, int]]
) -> None:
    assert list(contiguous_runs(targets, sources)) == runs
