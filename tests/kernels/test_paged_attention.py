from __future__ import annotations

import pytest
import torch

from support.paged_attention import PagedBatch, Shape


def test_a_lone_token_attends_to_itself(device: str) -> None:
    batch = PagedBatch(Shape(), [(0, 1)], device)

    assert batch.error(batch.attend()) < 2e-6


@pytest.mark.parametrize("context", [15, 16, 63, 64, 70])
def test_decode_sees_the_whole_context_and_nothing_behind_it(context: int, device: str) -> None:
    batch = PagedBatch(Shape(group=4, head_dim=32), [(context, 1), (3, 1)], device)

    assert batch.error(batch.attend()) < 2e-6


def test_parts_of_a_context_are_merged_by_the_last_to_end(device: str) -> None:
    batch = PagedBatch(Shape(group=1, num_kv_heads=1, head_dim=32), [(200, 1), (40, 1), (127, 1)], device)

    assert batch.error(batch.attend(part_len=64)) < 2e-6


def test_more_parts_than_one_load_fetches_are_merged(device: str) -> None:
    batch = PagedBatch(Shape(group=1, num_kv_heads=1, head_dim=16, block_size=32), [(300, 1)], device)

    assert batch.error(batch.attend(part_len=16, tiling=(16, 4, 3))) < 2e-6


@pytest.mark.parametrize("window", [1, 20, 64, 500])
def test_decode_through_a_sliding_window(window: int, device: str) -> None:
    batch = PagedBatch(Shape(window=window, head_dim=32), [(150, 1), (10, 1)], device)

    assert batch.error(batch.attend(part_len=64)) < 2e-6


def test_prefill_from_nothing(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=32), [(0, 70)], device)

    assert batch.error(batch.attend()) < 2e-6


def test_a_chunk_sees_what_earlier_chunks_computed(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=32, group=4), [(77, 45)], device)

    assert batch.error(batch.attend()) < 2e-6


@pytest.mark.parametrize("window", [1, 33])
def test_prefill_through_a_sliding_window_whose_first_tiles_some_queries_do_not_see(window: int, device: str) -> None:
    batch = PagedBatch(Shape(window=window, head_dim=16, group=1), [(90, 100)], device)

    assert batch.error(batch.attend()) < 2e-6


def test_chunks_and_decodes_of_one_step_mix(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=32, block_size=8), [(30, 1), (0, 20), (9, 1), (17, 3)], device)

    assert batch.error(batch.attend()) < 2e-6


def test_scores_are_capped(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=32, soft_cap=0.5), [(30, 1), (5, 20)], device)

    assert batch.error(batch.attend()) < 2e-6


def test_head_sizes_that_are_no_powers_of_two(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=80, num_kv_heads=1, group=7), [(30, 1), (5, 20)], device)

    assert batch.error(batch.attend()) < 2e-6


def test_half_precision(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=64, dtype=torch.float16), [(30, 1), (5, 20)], device)

    assert batch.error(batch.attend()) < 2e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 6e-3)])
def test_an_e4m3_pool_is_read_with_the_scales_of_its_heads(dtype: torch.dtype, tolerance: float, device: str) -> None:
    batch = PagedBatch(Shape(head_dim=32, dtype=dtype, fp8_kv=True), [(140, 1), (5, 20), (0, 1)], device)

    assert batch.error(batch.attend(part_len=128)) < tolerance


def test_an_e4m3_pool_with_shared_prefixes_and_capped_scores(device: str) -> None:
    shape = Shape(head_dim=80, num_kv_heads=2, group=2, soft_cap=2.0, fp8_kv=True)
    batch = PagedBatch(shape, [(100, 1), (80, 1), (3, 1)], device)
    batch.share([0, 1], num_blocks=5)

    assert batch.error(batch.attend()) < 2e-6


def test_an_e4m3_pool_through_a_sliding_window(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=16, group=1, window=33, fp8_kv=True), [(90, 1), (40, 30)], device)

    assert batch.error(batch.attend()) < 2e-6


def test_rows_that_share_a_prefix_read_it_once_and_go_on_with_their_own(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=32, group=4), [(100, 1), (7, 1), (80, 1), (97, 1), (5, 9)], device)
    batch.share([0, 2, 3], num_blocks=5)

    assert batch.error(batch.attend()) < 2e-6


def test_a_shared_prefix_is_split_and_rows_of_it_as_well(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=16, group=1, num_kv_heads=1, block_size=64), [(610, 1), (580, 1)], device)
    batch.share([1, 0], num_blocks=9)

    assert batch.error(batch.attend(part_len=16, tiling=(16, 4, 3))) < 2e-6


def test_two_groups_with_prefixes_of_their_own(device: str) -> None:
    batch = PagedBatch(Shape(head_dim=32, group=3, num_kv_heads=1), [(40, 1), (90, 1), (33, 1), (88, 1)], device)
    batch.share([0, 2], num_blocks=2)
    batch.share([3, 1], num_blocks=5)

    assert batch.error(batch.attend()) < 2e-6


@pytest.mark.parametrize(
    ("shape", "has_norms"),
    [
        (Shape(head_dim=32), False),
        (Shape(head_dim=32, window=40), True),
        (Shape(head_dim=80, group=4, num_kv_heads=1, soft_cap=5.0), True),
        (Shape(head_dim=32, fp8_kv=True), False),
    ],
)
def test_new_tokens_are_turned_stored_and_attended_to_in_one_launch(shape: Shape, has_norms: bool, device: str) -> None:
    batch = PagedBatch(shape, [(150, 1), (64, 1), (0, 1), (31, 1)], device)

    out, stored = batch.store_and_attend(in_one_launch=True, has_norms=has_norms)
    expected, expected_stored = batch.store_and_attend(in_one_launch=False, has_norms=has_norms)

    assert (out - expected).norm() < 1e-5 * expected.norm()
    assert (stored - expected_stored).norm() < 1e-5 * expected_stored.norm()
    assert stored.isfinite().all()
