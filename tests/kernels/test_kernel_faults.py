"""Faults that other engines' kernels had, by shape: masks of whole tiles, head sizes, ratios of heads, head counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.worker.kernels.store_kv import store_kv
from support.paged_attention import PagedBatch, Shape

CANARY = 777.0


@pytest.mark.parametrize("window", [1, 15, 16, 17])
def test_tiles_that_lie_wholly_outside_a_window_leave_no_nan(window: int, device: str) -> None:
    """A chunk of 64 on a context of 512, a decode, and a row of one token."""
    shape = Shape(head_dim=16, num_kv_heads=1, group=1, block_size=16, window=window)
    batch = PagedBatch(shape, [(512, 64), (300, 1), (0, 1)], device)
    out = batch.attend(part_len=128)
    assert torch.isfinite(out).all()
    assert batch.error(out) < 2e-6


@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256])
def test_any_head_size_is_attended_to_whole(head_dim: int, device: str) -> None:
    batch = PagedBatch(Shape(head_dim=head_dim, num_kv_heads=2, group=2), [(37, 1), (20, 9)], device)
    assert batch.error(batch.attend()) < 3e-6


@pytest.mark.parametrize("head_dim", [16, 40, 72, 80, 96, 112, 120, 160, 192])
def test_keys_and_values_of_any_head_size_stay_in_their_slots(head_dim: int, device: str) -> None:
    """Nothing is written but the two slots."""
    num_heads, num_kv_heads, block_size = 3, 2, 8
    heads = torch.randn((2, num_heads + 2 * num_kv_heads, head_dim), device=device)
    cache = torch.full((3, 2, num_kv_heads, block_size, head_dim), CANARY, device=device)
    expected = cache.clone()
    slots = (2 * block_size + 7, 5)
    for token, slot in enumerate(slots):
        expected[slot // block_size, 0, :, slot % block_size] = heads[token, num_heads : num_heads + num_kv_heads]
        expected[slot // block_size, 1, :, slot % block_size] = heads[token, num_heads + num_kv_heads :]
    not_turned = torch.cat((torch.ones(4, head_dim // 2), torch.zeros(4, head_dim // 2)), 1).to(device)
    positions = torch.zeros(2, dtype=torch.int32, device=device)
    store_kv(heads, not_turned, positions, torch.tensor(slots, device=device), cache)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 12, 20, 24, 32, 71])
def test_any_ratio_of_query_to_kv_heads(group: int, device: str) -> None:
    """A prefill, a decode and both in one step."""
    shape = Shape(head_dim=16, num_kv_heads=1, group=group)
    for rows in ([(0, 20)], [(30, 1), (3, 1)], [(18, 5), (40, 1)]):
        batch = PagedBatch(shape, rows, device)
        out: Tensor = batch.attend()
        assert batch.error(out) < 3e-6
