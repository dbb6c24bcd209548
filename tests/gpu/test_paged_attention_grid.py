"""Attention on a real GPU over a grid of shapes; every pair of values of two axes meets at least once or nearly so."""

from __future__ import annotations

import pytest
import torch

from support.paged_attention import NUM_LAYERS, TOLERANCE, PagedBatch, Shape
from support.pairwise import case_name, pairwise_cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

AXES: dict[str, list[object]] = {
    "head_dim": [64, 80, 96, 128, 256],
    "group": [1, 3, 4, 7, 8],
    "block_size": [8, 16, 32, 64, 128],
    "dtype": [torch.bfloat16, torch.float16],
    "window": [None, 1, 100, 1024],
    "soft_cap": [0.0, 30.0],
    "fp8_kv": [False, True],
    "rows": ["lone", "decodes", "long", "chunks", "mixed", "some", "many"],
}
ROWS: dict[str, list[tuple[int, int]]] = {
    "lone": [(0, 1)],
    "decodes": [(length, 1) for length in (1, 15, 16, 17, 127, 128, 129, 1000, 2047, 3000)],
    "long": [(33_000, 1), (5, 1)],
    "chunks": [(0, 33), (100, 128), (1000, 1), (0, 2), (513, 300)],
    "mixed": [(700, 1), (0, 1), (31, 17), (2000, 1), (64, 64)],
    "some": [(index * 13 % 700, 1) for index in range(150)],
    "many": [(index % 300, 1) for index in range(1024)],
}


@pytest.mark.parametrize("case", pairwise_cases(AXES, limit=120), ids=case_name)
def test_attention_equals_the_plain_one(case: dict[str, object]) -> None:
    shape = Shape(**{name: value for name, value in case.items() if name != "rows"})  # type: ignore[arg-type]
    batch = PagedBatch(shape, ROWS[str(case["rows"])], "cuda", seed=1)

    assert batch.error(batch.attend()) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("tiling", [(32, 1, 2), (32, 1, 3), (32, 2, 3), (64, 4, 2), (128, 4, 2)])
def test_all_tilings_give_the_same(tiling: tuple[int, int, int]) -> None:
    batch = PagedBatch(Shape(head_dim=128, group=4, dtype=torch.bfloat16), ROWS["mixed"] + ROWS["decodes"], "cuda")

    assert batch.error(batch.attend(tiling=tiling)) < TOLERANCE[torch.bfloat16]


def test_a_context_of_131072_tokens() -> None:
    batch = PagedBatch(Shape(head_dim=128, group=4, dtype=torch.bfloat16), [(131_071, 1), (131_000, 72)], "cuda")

    assert batch.error(batch.attend()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("fp8_kv", [False, True])
def test_blocks_beyond_2_to_the_31_elements_are_found(fp8_kv: bool) -> None:
    shape = Shape(head_dim=128, num_kv_heads=8, group=4, dtype=torch.bfloat16, fp8_kv=fp8_kv)
    batch = PagedBatch(shape, [(500, 1), (40, 30)], "cuda")
    small = batch.pool
    num_blocks = 2**31 // small[0].numel() + len(small) + 1
    batch.pool = torch.empty((num_blocks, NUM_LAYERS, *small.shape[2:]), dtype=small.dtype, device="cuda")
    batch.pool[-len(small) :] = small
    batch.tables = torch.where(batch.tables < len(small), batch.tables + num_blocks - len(small), batch.tables)

    assert batch.error(batch.attend()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    ("head_dim", "group", "num_kv_heads", "fp8_kv"),
    [
        (128, 4, 8, True),
        (128, 4, 8, False),
        (128, 7, 2, False),
        (64, 3, 2, False),
        (80, 1, 4, False),
        (256, 8, 1, True),
    ],
)
def test_shared_prefixes_give_the_same(head_dim: int, group: int, num_kv_heads: int, fp8_kv: bool) -> None:
    shape = Shape(head_dim=head_dim, group=group, num_kv_heads=num_kv_heads, dtype=torch.bfloat16, fp8_kv=fp8_kv)
    batch = PagedBatch(shape, [(1700 + row, 1) for row in range(150)] + [(400, 30), (3000, 1), (2800, 1)], "cuda")
    batch.share(range(150), num_blocks=100)
    batch.share([151, 152], num_blocks=170)

    assert batch.error(batch.attend()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_one_prefix_of_many_rows_whose_tiles_outnumber_multiprocessors(block_size: int) -> None:
    shape = Shape(head_dim=128, group=4, num_kv_heads=8, dtype=torch.bfloat16, block_size=block_size)
    batch = PagedBatch(shape, [(1488 + 64 + row % 150, 1) for row in range(700)], "cuda")
    batch.share(range(700), num_blocks=(1488 + 40) // block_size)

    assert batch.error(batch.attend()) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("part_len", [64, 256, 4096])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(head_dim=128, group=4, num_kv_heads=8, dtype=torch.bfloat16),
        Shape(head_dim=128, group=4, num_kv_heads=8, dtype=torch.bfloat16, fp8_kv=True),
        Shape(head_dim=80, group=3, dtype=torch.float16, window=100, soft_cap=30.0),
        Shape(head_dim=256, group=8, num_kv_heads=1, dtype=torch.bfloat16),
    ],
)
def test_new_tokens_are_turned_stored_and_attended_to_in_one_launch(shape: Shape, part_len: int) -> None:
    for lengths in (ROWS["decodes"], ROWS["lone"], ROWS["long"], [(index % 300, 1) for index in range(700)]):
        batch = PagedBatch(shape, lengths, "cuda", seed=2)

        out, stored = batch.store_and_attend(in_one_launch=True, has_norms=True, part_len=part_len)
        expected, expected_stored = batch.store_and_attend(in_one_launch=False, has_norms=True, part_len=part_len)

        assert (out - expected).norm() < TOLERANCE[shape.dtype] * expected.norm()
        assert (stored - expected_stored).norm() < TOLERANCE[shape.dtype] * expected_stored.norm()
