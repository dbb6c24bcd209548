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
    "rows": ["lone", "decodes", "long", "chunks", "mixed", "many"],
}
ROWS: dict[str, list[tuple[int, int]]] = {
    "lone": [(0, 1)],
    "decodes": [(length, 1) for length in (1, 15, 16, 17, 127, 128, 129, 1000, 2047, 3000)],
    "long": [(33_000, 1), (5, 1)],
    "chunks": [(0, 33), (100, 128), (1000, 1), (0, 2), (513, 300)],
    "mixed": [(700, 1), (0, 1), (31, 17), (2000, 1), (64, 64)],
    "many": [(index % 300, 1) for index in range(700)],
}


@pytest.mark.parametrize("case", pairwise_cases(AXES, limit=120), ids=case_name)
def test_attention_equals_the_plain_one(case: dict[str, object]) -> None:
    shape = Shape(**{name: value for name, value in case.items() if name != "rows"})  # type: ignore[arg-type]
    batch = PagedBatch(shape, ROWS[str(case["rows"])], "cuda", seed=1)

    assert batch.error(batch.attend()) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("tiling", [(32, 2, 4), (64, 4, 3), (128, 4, 3)])
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


@pytest.mark.parametrize(("head_dim", "group", "num_kv_heads"), [(128, 4, 8), (64, 3, 2), (80, 1, 4), (256, 8, 1)])
def test_shared_prefixes_give_the_same(head_dim: int, group: int, num_kv_heads: int) -> None:
    shape = Shape(
        head_dim=head_dim, group=group, num_kv_heads=num_kv_heads, dtype=torch.bfloat16, fp8_kv=head_dim >= 128
    )
    batch = PagedBatch(shape, [(1700 + row, 1) for row in range(150)] + [(400, 30), (3000, 1), (2800, 1)], "cuda")
    batch.share(range(150), num_blocks=100)
    batch.share([151, 152], num_blocks=170)

    assert batch.error(batch.attend()) < TOLERANCE[torch.bfloat16]
