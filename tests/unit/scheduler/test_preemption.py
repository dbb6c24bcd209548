"""Recompute, swap, or swap of a tail; and what the choice costs."""

from __future__ import annotations

import pytest

from octavo.common.messages.kv import PoolCounts
from octavo.common.messages.step import StepResult
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.preemption import Preemption, PreemptionMode, PreemptionSettings
from octavo.scheduler.queues import Slots
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.swapping import Swapping
from support.sequences import make_running


def preemption_of(mode: PreemptionMode) -> Preemption:
    account = BlockAccount(num_blocks=64, block_size=16)
    return Preemption(PreemptionSettings(mode), 16, Swapping(account, Slots(4)))


def with_host_blocks(num_free: int) -> PoolCounts:
    return PoolCounts(0, 0, 64, 0, 0, host_free=num_free)


def long_sequence() -> Sequence:
    """Ten blocks, 150 tokens computed."""
    sequence = make_running(150, block_ids=tuple(range(10)), slot=0, num_computed=150)
    sequence.is_open = True
    return sequence


def step(compute_us: int = 1000, transfer_us: int = 0) -> StepResult:
    return StepResult(1, [], [], compute_us, 0, transfer_us=transfer_us)


def test_only_as_much_of_the_tail_as_is_needed_is_swapped() -> None:
    assert preemption_of("swap").num_kept_blocks(long_sequence(), 3, with_host_blocks(64)) == 7
    assert preemption_of("swap").num_kept_blocks(long_sequence(), 30, with_host_blocks(64)) == 0


def test_host_memory_without_room_means_recompute() -> None:
    assert preemption_of("swap").num_kept_blocks(long_sequence(), 30, with_host_blocks(9)) is None
    assert preemption_of("swap").num_kept_blocks(long_sequence(), 3, with_host_blocks(0)) is None


def test_a_sequence_whose_table_the_worker_has_not_seen_has_nothing_to_save() -> None:
    sequence = long_sequence()
    sequence.is_open = False
    assert preemption_of("swap").num_kept_blocks(sequence, 3, with_host_blocks(64)) is None


@pytest.mark.parametrize(("us_per_block", "num_kept"), [(100, 0), (10_000, None)])
def test_the_cheaper_way_is_taken_by_the_rates_measured(us_per_block: int, num_kept: int | None) -> None:
    """150 tokens at 10,000 a second take 15 ms; ten blocks there and back 2 ms or 200 ms."""
    preemption = preemption_of("auto")
    preemption.cost.on_step(step(transfer_us=4 * us_per_block), 0, 1, num_copied_blocks=4)
    preemption.cost.on_step(step(compute_us=10_000), num_prefill_tokens=100, num_tokens=100, num_copied_blocks=0)
    assert preemption.cost.of_recompute(150) == pytest.approx(0.015)
    assert preemption.num_kept_blocks(long_sequence(), 10, with_host_blocks(64)) == num_kept


@pytest.mark.parametrize(
    ("mode", "block_copy_us", "skips"),
    [("auto", 1500, False), ("auto", 1700, True), ("recompute", 1700, True), ("swap", 1700, False)],
)
def test_a_prefix_in_host_memory_is_left_there_if_computing_it_is_faster(
    mode: PreemptionMode, block_copy_us: int, skips: bool
) -> None:
    """A block of 16 tokens at 10,000 a second takes 1.6 ms."""
    preemption = preemption_of(mode)
    preemption.cost.on_step(step(transfer_us=4 * block_copy_us), 0, 1, num_copied_blocks=4)
    assert not preemption.skips_host_prefixes, "prompts have not been measured"
    preemption.cost.on_step(step(compute_us=10_000), num_prefill_tokens=100, num_tokens=100, num_copied_blocks=0)
    assert preemption.cost.compute_s == pytest.approx(0.0016)
    assert preemption.cost.copy_s == pytest.approx(block_copy_us * 1e-6)
    assert preemption.skips_host_prefixes == skips


def test_later_measurements_count_for_a_tenth_and_decodes_say_nothing_of_prompts() -> None:
    cost = preemption_of("auto").cost
    for compute_us in (10_000, 20_000):
        cost.on_step(step(compute_us), num_prefill_tokens=100, num_tokens=100, num_copied_blocks=0)
    cost.on_step(step(1), num_prefill_tokens=3, num_tokens=200, num_copied_blocks=0)
    assert cost.prefill_tokens_per_s == pytest.approx(9500)
