"""Blocks move to host memory and back: byte for byte, in the order of the plan, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from octavo.common.errors import ProtocolError, StaleBlockError
from octavo.common.messages.kv import BlockCopy, Transfer, TransferDirection
from octavo.common.messages.step import OpenSlot, StepPlan, TableDelta
from octavo.worker.block_transfers import new_transfers
from octavo.worker.model_runner import ModelRunner
from octavo.worker.transfer_check import independent_copies
from support.runner_driver import RunnerDriver, make_runner
from support.tiny_models import TinyModel

TO_HOST, TO_DEVICE = TransferDirection.TO_HOST, TransferDirection.TO_DEVICE
NUM_HOST_BLOCKS = 8


@pytest.fixture
def runner(tiny: Callable[[str], TinyModel], request: pytest.FixtureRequest) -> ModelRunner:
    """The parameter is whether K and V are e4m3."""
    fp8_kv = getattr(request, "param", False)
    return make_runner(tiny("llama").folder, num_host_blocks=NUM_HOST_BLOCKS, fp8_kv=fp8_kv)


def transfer(direction: TransferDirection, device: int, generation: int, host: int, transfer_id: int = 1) -> Transfer:
    return Transfer(transfer_id, direction, (device,), (generation,), (host,))


def test_a_block_comes_back_as_it_went(runner: ModelRunner) -> None:
    pool = runner._kv_cache.pool
    pool[3] = 1.5
    runner.execute(StepPlan(1, transfers=[transfer(TO_HOST, 3, 1, 6)]))
    pool[3] = 0.0
    samples = runner.execute(StepPlan(2, transfers=[transfer(TO_DEVICE, 5, 2, 6, transfer_id=9)]))
    assert pool[5].eq(1.5).all()
    assert samples.transfers.transfer_ids == [9]


def test_within_a_plan_a_block_is_saved_before_it_is_copied_over_and_filled_after_it_was_copied_from(
    runner: ModelRunner,
) -> None:
    pool = runner._kv_cache.pool
    pool[1], pool[2] = 1.0, 2.0
    runner.execute(StepPlan(1, transfers=[transfer(TO_HOST, 1, 1, 0)]))
    plan = StepPlan(
        2,
        transfers=[transfer(TO_DEVICE, 2, 5, 0, transfer_id=2), transfer(TO_HOST, 3, 1, 4, transfer_id=3)],
        copies=[BlockCopy(2, 3, 1, 2)],
    )
    pool[3] = 3.0
    runner.execute(plan)
    assert pool[3].eq(2.0).all(), "the copy reads block 2 before it is filled"
    assert pool[2].eq(1.0).all()
    runner.execute(StepPlan(3, transfers=[transfer(TO_DEVICE, 7, 1, 4)]))
    assert pool[7].eq(3.0).all(), "block 3 was saved before the copy"


@pytest.mark.parametrize("runner", [False, True], indirect=True, ids=["float32", "e4m3"])
def test_a_sequence_goes_on_with_the_same_tokens_after_its_blocks_went_to_the_host(runner: ModelRunner) -> None:
    prompt = [5, 6, 7, 8] * 9
    driver = RunnerDriver(runner)
    undisturbed = driver.open(prompt, 12)
    driver.generate([undisturbed], 12)

    swapped = driver.open(prompt, 12, block_ids=[10, 11, 12])
    driver.generate([swapped], 5)
    moves = (
        Transfer(1, TO_HOST, (10, 11, 12), (1, 1, 1), (7, 2, 4)),
        Transfer(2, TO_DEVICE, (20, 21, 22), (1, 1, 1), (7, 2, 4)),
    )
    runner.execute(StepPlan(driver._next_step, closed_slots=[swapped.slot], transfers=[moves[0]]))
    runner._kv_cache.pool[10:13] = torch.nan
    runner.execute(StepPlan(driver._next_step + 1, transfers=[moves[1]]))
    driver._next_step += 2
    back = driver.open(prompt + swapped.output, 8, block_ids=[20, 21, 22])
    back.num_computed = len(prompt) + 4
    driver.generate([back], 7)
    assert swapped.output + back.output == undisturbed.output


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (transfer(TO_HOST, 96, 1, 0), ProtocolError),
        (transfer(TO_HOST, -1, 1, 0), ProtocolError),
        (transfer(TO_HOST, 1, 1, NUM_HOST_BLOCKS), ProtocolError),
        (Transfer(1, TO_DEVICE, (1, 2), (1,), (0, 1)), ProtocolError),
        (Transfer(1, TO_DEVICE, (1, 1), (1, 1), (0, 1)), ProtocolError),
        (Transfer(1, TO_HOST, (1, 2), (1, 1), (0, 0)), ProtocolError),
        (transfer(TO_HOST, 9, 3, 0), StaleBlockError),
        (transfer(TO_DEVICE, 9, 3, 0), StaleBlockError),
        (transfer(TO_DEVICE, 9, 5, 0), StaleBlockError),
    ],
)
def test_a_broken_transfer_is_refused_before_anything_moves(
    runner: ModelRunner, broken: Transfer, error: type[ProtocolError]
) -> None:
    """Block 9 stands in a live table at generation 4."""
    opening = OpenSlot(0, 0, (0,), 0.0, 1.0, 0, None)
    runner.execute(StepPlan(1, opened_slots=[opening], table_deltas=[TableDelta(0, 0, (9,), (4,))]))
    runner._kv_cache.pool.fill_(2.0)
    with pytest.raises(error):
        runner.execute(StepPlan(2, transfers=[transfer(TO_HOST, 2, 1, 1, transfer_id=5), broken]))
    assert runner._kv_cache.pool.eq(2.0).all()
    assert not runner._kv_cache.transfers.finished(wait=True).transfer_ids


def test_a_source_whose_new_owner_comes_with_the_same_plan_is_saved_under_its_old_generation(
    runner: ModelRunner,
) -> None:
    opening = OpenSlot(0, 0, (0,), 0.0, 1.0, 0, None)
    delta = TableDelta(0, 0, (9,), (5,))
    samples = runner.execute(
        StepPlan(1, opened_slots=[opening], table_deltas=[delta], transfers=[transfer(TO_HOST, 9, 4, 0)])
    )
    assert samples.transfers.transfer_ids == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_copy_waits_for_the_writer_and_the_next_writer_for_the_copy() -> None:
    """A slow kernel writes the block; its copy, queued at once, must hold what the kernel wrote (swp-7c1)."""
    pool = torch.zeros((4, 2, 2, 8, 16, 64), device="cuda")
    transfers = new_transfers(pool, 4)
    for round_no in range(1, 11):
        torch.cuda._sleep(20_000_000)
        pool[1].fill_(round_no)
        transfers.to_host([transfer(TO_HOST, 1, 1, 2, transfer_id=round_no)])
        transfers.before_compute([1])
        pool[1].fill_(-1.0)
        transfers.to_device([transfer(TO_DEVICE, 3, 1, 2, transfer_id=100 + round_no)])
        assert set(transfers.finished(wait=True).transfer_ids) == {round_no, 100 + round_no}
        assert pool[3].eq(round_no).all()


def test_copies_come_together_if_none_touches_a_block_of_another() -> None:
    copies = [BlockCopy(source, target) for source, target in ((0, 1), (2, 3), (1, 4), (5, 6), (6, 7), (8, 6))]

    together = list(independent_copies(copies))

    assert together == [copies[:2], copies[2:4], copies[4:5], copies[5:]]
    assert list(independent_copies([])) == []
