"""The GPU runner moves blocks to the host and back between steps that are all launched ahead; tokens as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.common.errors import StaleBlockError
from octavo.common.messages.kv import BlockCopy, Transfer, TransferDirection
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from octavo.worker.kv_cache import KvCache
from octavo.worker.models.weights import load_decoder
from octavo.worker.runner import LaunchedStep, Runner
from support.runner_driver import BLOCK_SIZE, NUM_BLOCKS, make_runner
from support.tiny_models import prompt_of, save_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SAMPLE, FED = RowFlag.SAMPLE, RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE
TO_HOST, TO_DEVICE = TransferDirection.TO_HOST, TransferDirection.TO_DEVICE
NUM_HOST_BLOCKS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama")).folder


def make_gpu_runner(folder: Path) -> Runner:
    from octavo.worker.gpu_runner import GpuRunner
    from octavo.worker.models.gpu_decoder import GpuDecoder

    device = torch.device("cuda")
    model = GpuDecoder(load_decoder(folder, torch.float32, device))
    kv_cache = KvCache(model.config, NUM_BLOCKS, BLOCK_SIZE, torch.float32, device, NUM_HOST_BLOCKS)
    kv_cache.pool.fill_(torch.nan)
    runner = GpuRunner(model, kv_cache, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=256)
    runner.compile_steps(lambda share: None)
    runner.capture_graphs(lambda share: None)
    return runner


@pytest.fixture(scope="module")
def runners(folder: Path) -> tuple[Runner, Runner]:
    """On the GPU, and on the CPU what is expected of it."""
    return make_gpu_runner(folder), make_runner(folder, num_host_blocks=NUM_HOST_BLOCKS)


def opened(slot: int) -> OpenSlot:
    return OpenSlot(slot, slot, (slot,), 0.0, 1.0, 0, None)


def prefill(step: int, slot: int, length: int, block_ids: tuple[int, ...], generation: int = 1) -> StepPlan:
    return StepPlan(
        step,
        opened_slots=[opened(slot)],
        table_deltas=[TableDelta(slot, 0, block_ids, (generation,) * len(block_ids))],
        slots=[slot],
        starts=[0],
        lengths=[length],
        flags=[SAMPLE],
        token_ids=prompt_of(length),
    )


def decode(step: int, slot: int, position: int) -> StepPlan:
    return StepPlan(step, slots=[slot], starts=[position], lengths=[1], flags=[FED])


def test_a_swapped_sequence_goes_on_while_others_overwrite_its_blocks(runners: tuple[Runner, Runner]) -> None:
    """Swap out, give the blocks away in the very next plan, swap in elsewhere: nothing is waited for in between."""
    plans = [prefill(1, 0, 40, (10, 11, 12)), *(decode(2 + step, 0, 40 + step) for step in range(3))]
    plans.append(StepPlan(5, closed_slots=[0], transfers=[Transfer(1, TO_HOST, (10, 11, 12), (1, 1, 1), (7, 2, 3))]))
    plans.append(prefill(6, 1, 47, (12, 10, 11), generation=2))
    plans += [decode(7 + step, 1, 47 + step) for step in range(1)]
    plans.append(StepPlan(8, transfers=[Transfer(2, TO_DEVICE, (20, 21, 22), (1, 1, 1), (7, 2, 3))]))
    expected_rest: list[int] = []
    outcomes: list[list[list[int]]] = []
    for runner in runners:
        runner.reset()
        launched: list[LaunchedStep] = [runner.launch(plan) for plan in plans]
        tokens = [step.wait() for step in launched]
        fourth = tokens[3].token_ids[0]
        back = StepPlan(
            9,
            opened_slots=[opened(5)],
            table_deltas=[TableDelta(5, 0, (20, 21, 22), (1, 1, 1))],
            slots=[5],
            starts=[43],
            lengths=[1],
            flags=[SAMPLE],
            token_ids=[fourth],
        )
        rest = [runner.launch(plan) for plan in (back, *(decode(10 + step, 5, 44 + step) for step in range(3)))]
        outcomes.append([one.token_ids for one in tokens] + [step.wait().token_ids for step in rest])
        finished = sorted(number for one in tokens for number in one.transfers.transfer_ids)
        assert finished == [1, 2]
        expected_rest = [tokens_of[0] for tokens_of in outcomes[-1][-4:]]
    assert outcomes[0] == outcomes[1]
    undisturbed = runners[1]
    undisturbed.reset()
    whole = [undisturbed.execute(prefill(1, 0, 40, (10, 11, 12))).token_ids]
    whole += [undisturbed.execute(decode(2 + step, 0, 40 + step)).token_ids for step in range(7)]
    assert [tokens[0] for tokens in whole[4:]] == expected_rest


def test_the_tail_of_a_sequence_comes_back_beside_blocks_that_stayed(runners: tuple[Runner, Runner]) -> None:
    """The first block stays on the device, the other two travel, written over in between by a copy."""
    outcomes = []
    for runner in runners:
        runner.reset()
        plans = [
            prefill(1, 0, 40, (30, 31, 32)),
            StepPlan(2, closed_slots=[0], transfers=[Transfer(1, TO_HOST, (31, 32), (1, 1), (0, 1))]),
            prefill(3, 1, 20, (40, 41)),
            StepPlan(4, copies=[BlockCopy(40, 31, 1, 2), BlockCopy(41, 32, 1, 2)]),
            StepPlan(5, transfers=[Transfer(2, TO_DEVICE, (50, 51), (1, 1), (0, 1))]),
        ]
        steps = [runner.launch(plan) for plan in plans]
        first = steps[0].wait().token_ids
        for step in steps[1:]:
            step.wait()
        back = StepPlan(
            6,
            opened_slots=[opened(2)],
            table_deltas=[TableDelta(2, 0, (30, 50, 51), (1, 1, 1))],
            slots=[2],
            starts=[40],
            lengths=[1],
            flags=[SAMPLE],
            token_ids=first,
        )
        outcomes.append(first + runner.execute(back).token_ids + runner.execute(decode(7, 2, 41)).token_ids)
    assert outcomes[0] == outcomes[1]


def test_one_host_block_serves_two_that_restore_it(runners: tuple[Runner, Runner]) -> None:
    """A prefix that sank to the host is restored twice, into blocks of two sequences."""
    outcomes = []
    for runner in runners:
        runner.reset()
        tokens = runner.execute(prefill(1, 0, 33, (60, 61, 62))).token_ids
        for plan in (
            StepPlan(2, transfers=[Transfer(1, TO_HOST, (60, 61), (1, 1), (4, 5))]),
            StepPlan(
                3,
                transfers=[
                    Transfer(2, TO_DEVICE, (70, 71), (1, 1), (4, 5)),
                    Transfer(3, TO_DEVICE, (80, 81), (1, 1), (4, 5)),
                ],
            ),
        ):
            runner.execute(plan)
        for slot, block_ids in ((3, (70, 71, 72)), (4, (80, 81, 82))):
            whole = prefill(4 + slot, slot, 33, block_ids)
            tokens += runner.execute(replace(whole, starts=[32], lengths=[1], token_ids=prompt_of(33)[32:])).token_ids
        outcomes.append(tokens)
    assert outcomes[0] == outcomes[1]
    assert len(set(outcomes[0])) == 1


def test_a_stale_transfer_is_refused_before_anything_moves(runners: tuple[Runner, Runner]) -> None:
    runner = runners[0]
    runner.reset()
    runner.execute(prefill(1, 0, 20, (5, 6), generation=4))
    with pytest.raises(StaleBlockError):
        runner.execute(StepPlan(2, transfers=[Transfer(1, TO_HOST, (5,), (3,), (0,))]))
    with pytest.raises(StaleBlockError):
        runner.execute(StepPlan(2, transfers=[Transfer(1, TO_DEVICE, (5,), (5,), (0,))]))
    assert runner.execute(StepPlan(2)).transfers.transfer_ids == []


def test_host_memory_is_locked_and_given_back() -> None:
    from octavo.worker.pinned_memory import pinned_zeros

    for _ in range(3):  # the same pages may be locked again, which fails if they still are
        tensor = pinned_zeros((3, 1000, 1001), torch.float32)
        assert tensor.is_pinned()
        source = torch.arange(tensor.numel(), dtype=torch.float32, device="cuda").view(tensor.shape)
        tensor.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(tensor, source.cpu())
        del tensor
    assert pinned_zeros((0, 4), torch.float32).numel() == 0
