"""A pool of more than 2**31 elements: writes, copies and transfers of its last blocks reach them."""

from __future__ import annotations

import pytest
import torch

from octavo.common.messages.kv import Transfer, TransferDirection
from octavo.worker.block_transfers import new_transfers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BLOCK_SHAPE = (2, 2, 8, 16, 128)  # layers, K and V, heads, tokens, head size
BLOCK_ELEMENTS = 2 * 2 * 8 * 16 * 128
NUM_BLOCKS = 2**31 // BLOCK_ELEMENTS + 64
CANARY = 3.0


@pytest.fixture(scope="module")
def pool() -> torch.Tensor:
    return torch.empty((NUM_BLOCKS, *BLOCK_SHAPE), dtype=torch.bfloat16, device="cuda")


def test_keys_and_values_are_written_to_the_last_blocks(pool: torch.Tensor) -> None:
    from octavo.worker.kernels.store_kv import store_kv

    pool.fill_(CANARY)
    heads = torch.randn((3, 32 + 16, 128), dtype=torch.bfloat16, device="cuda")
    small = torch.full((3, *BLOCK_SHAPE[1:]), CANARY, dtype=torch.bfloat16, device="cuda")
    last = torch.tensor([NUM_BLOCKS - 1, NUM_BLOCKS - 2, 0], device="cuda")
    table = torch.randn((100, 128), device="cuda")
    positions = torch.tensor([5, 17, 99], dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, 15, 7], device="cuda")
    store_kv(heads.clone(), table, positions, last * 16 + offsets, pool[:, 1])
    store_kv(heads.clone(), table, positions, torch.tensor([2, 1, 0], device="cuda") * 16 + offsets, small)
    assert torch.equal(pool[last, 1], small.flip(0))
    pool[last, 1] = CANARY
    assert all(bool(part.eq(CANARY).all()) for part in pool.split(2048))


def test_blocks_are_copied_between_both_ends(pool: torch.Tensor) -> None:
    from octavo.worker.kernels.copy_blocks import copy_blocks

    pool.fill_(CANARY)
    pool[NUM_BLOCKS - 1], pool[1] = 5.0, 7.0
    words = pool.view(NUM_BLOCKS, -1).view(torch.int32)
    sources, targets = (
        torch.tensor(ids, dtype=torch.int32, device="cuda") for ids in ((NUM_BLOCKS - 1, 1), (2, NUM_BLOCKS - 3))
    )
    copy_blocks(words, sources, targets)
    assert pool[2].eq(5.0).all()
    assert pool[NUM_BLOCKS - 3].eq(7.0).all()
    for block_id in (1, 2, NUM_BLOCKS - 1, NUM_BLOCKS - 3):
        pool[block_id] = CANARY
    assert all(bool(part.eq(CANARY).all()) for part in pool.split(2048))


def test_the_last_blocks_go_to_the_host_and_back(pool: torch.Tensor) -> None:
    transfers = new_transfers(pool, 4)
    for index in range(4):
        pool[NUM_BLOCKS - 1 - index] = float(index)
    ids = tuple(NUM_BLOCKS - 1 - index for index in range(4))
    transfers.to_host([Transfer(1, TransferDirection.TO_HOST, ids, (1,) * 4, (3, 0, 2, 1))])
    transfers.to_device([Transfer(2, TransferDirection.TO_DEVICE, (0, 1, 2, 3), (1,) * 4, (3, 0, 2, 1))])
    assert sorted(transfers.finished(wait=True).transfer_ids) == [1, 2]
    assert [pool[index].float().unique().tolist() for index in range(4)] == [[0.0], [1.0], [2.0], [3.0]]
