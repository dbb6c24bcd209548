"""A pool of more than 2**31 elements: what an id is multiplied with passes 32 bits.

The pool is reserved and hardly written, so it takes address space and no memory.
"""

from __future__ import annotations

import pytest
import torch

from octavo.worker.kernels.copy_blocks import copy_blocks
from octavo.worker.kernels.store_kv import store_kv
from support.paged_attention import PagedBatch, Shape

SHAPE = Shape(head_dim=128, num_kv_heads=8, group=1, dtype=torch.float16)


@pytest.fixture(autouse=True)
def on_cpu(device: str) -> None:
    """A GPU's memory is real; `tests/gpu` has the same for it."""
    if device != "cpu":
        pytest.skip("the pool is not reserved lazily here")


def in_last_blocks(batch: PagedBatch) -> int:
    """Move the batch's blocks to the end of a pool that is too large for 32 bits. Blocks before them."""
    small = batch.pool
    num_before = 2**31 // small[0].numel() + 1
    batch.pool = torch.empty((num_before + len(small), *small.shape[1:]), dtype=small.dtype)
    batch.pool[num_before:] = small
    batch.tables = torch.where(batch.tables < len(small), batch.tables + num_before, batch.tables)
    return num_before


def test_prefill_and_decode_read_the_last_blocks() -> None:
    batch = PagedBatch(SHAPE, [(20, 1), (5, 3)], "cpu")
    in_small = batch.attend()
    in_last_blocks(batch)
    assert torch.equal(batch.attend(), in_small)


def test_a_shared_prefix_is_read_from_the_last_blocks() -> None:
    batch = PagedBatch(SHAPE, [(36, 1), (40, 1)], "cpu")
    batch.share([0, 1], num_blocks=2)
    in_small = batch.attend()
    in_last_blocks(batch)
    assert torch.equal(batch.attend(), in_small)


def test_keys_and_values_are_written_to_the_last_blocks() -> None:
    batch = PagedBatch(SHAPE, [(20, 1)], "cpu")
    small = batch.pool.clone()
    num_before = in_last_blocks(batch)
    torch.manual_seed(1)
    heads = torch.randn((3, 3 * SHAPE.num_kv_heads, SHAPE.head_dim), dtype=torch.float16)
    table = torch.randn((100, SHAPE.head_dim))
    positions = torch.tensor([5, 17, 99], dtype=torch.int32)
    slots = torch.tensor([0, 17, 16 * len(small) - 1])
    store_kv(heads.clone(), table, positions, slots, small[:, 1])
    store_kv(heads.clone(), table, positions, slots + num_before * SHAPE.block_size, batch.pool[:, 1])
    assert torch.equal(batch.pool[num_before:].nan_to_num(7.0), small.nan_to_num(7.0))


def test_blocks_are_copied_from_one_end_to_the_other() -> None:
    block_words = 8192
    num_blocks = 2**31 // block_words + 2
    pool = torch.empty((num_blocks, block_words), dtype=torch.int32)
    for block_id in (0, 1, num_blocks - 2, num_blocks - 1):
        pool[block_id] = block_id
    sources, targets = torch.tensor([num_blocks - 1, 1]), torch.tensor([0, num_blocks - 2])
    copy_blocks(pool, sources.int(), targets.int())
    first = [pool[block_id].unique().tolist() for block_id in (0, 1, num_blocks - 2, num_blocks - 1)]
    assert first == [[num_blocks - 1], [1], [1], [num_blocks - 1]]
