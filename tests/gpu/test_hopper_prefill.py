"""Prefill attention by the kernel for Hopper over a grid of shapes, each program with many items."""

from __future__ import annotations

import pytest
import torch

from support.paged_attention import NUM_LAYERS, TOLERANCE, PagedBatch, Shape
from support.pairwise import case_name, pairwise_cases

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from octavo.worker.kernels.hopper_prefill import serves

pytestmark = pytest.mark.gpu

ROWS: dict[str, list[tuple[int, int]]] = {
    "lone chunk": [(0, 2)],
    "ends of tiles": [(0, 127), (0, 128), (0, 129), (127, 2), (128, 128), (100, 29)],
    "chunks among decodes": [(700, 1), (31, 17), (2000, 1), (64, 64), (513, 300)],
    "many items": [(index * 37, 40 + index * 5) for index in range(60)],
    "long": [(9000, 700), (0, 3000)],
}
AXES: dict[str, list[object]] = {
    "group": [1, 3, 4, 7, 8],
    "block_size": [8, 16, 32, 64, 128],
    "dtype": [torch.bfloat16, torch.float16],
    "rows": list(ROWS),
}


@pytest.mark.parametrize("case", pairwise_cases(AXES, limit=40), ids=case_name)
def test_attention_equals_the_plain_one(case: dict[str, object]) -> None:
    of_shape = {name: value for name, value in case.items() if name != "rows"}
    shape = Shape(head_dim=128, **of_shape)  # type: ignore[arg-type]
    batch = PagedBatch(shape, ROWS[str(case["rows"])], "cuda", seed=1)

    assert serves(batch.query, batch.pool[:, 0])
    assert batch.error(batch.attend()) < TOLERANCE[shape.dtype]


def test_queries_may_lie_among_keys_and_values() -> None:
    """As in a step, where one product makes all three."""
    batch = PagedBatch(Shape(head_dim=128, group=4, dtype=torch.bfloat16), ROWS["chunks among decodes"], "cuda")
    heads = torch.full((len(batch.query), 12, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    heads[:, :8] = batch.query
    batch.query = heads[:, :8]

    assert batch.error(batch.attend()) < TOLERANCE[torch.bfloat16]


def test_padding_reads_and_writes_nothing() -> None:
    batch = PagedBatch(Shape(head_dim=128, group=4, dtype=torch.bfloat16), ROWS["chunks among decodes"], "cuda")

    out = batch.attend(num_padding_tiles=300)

    assert batch.error(out) < TOLERANCE[torch.bfloat16]


def test_a_context_of_131072_tokens() -> None:
    batch = PagedBatch(Shape(head_dim=128, group=4, dtype=torch.bfloat16), [(131_000, 72)], "cuda")

    assert batch.error(batch.attend()) < TOLERANCE[torch.bfloat16]


def test_blocks_beyond_2_to_the_31_elements_are_found() -> None:
    shape = Shape(head_dim=128, num_kv_heads=8, group=4, dtype=torch.bfloat16)
    batch = PagedBatch(shape, [(500, 17), (40, 30)], "cuda")
    small = batch.pool
    num_blocks = 2**31 // small[0].numel() + len(small) + 1
    batch.pool = torch.empty((num_blocks, NUM_LAYERS, *small.shape[2:]), dtype=small.dtype, device="cuda")
    batch.pool[-len(small) :] = small
    batch.tables = torch.where(batch.tables < len(small), batch.tables + num_blocks - len(small), batch.tables)

    assert batch.error(batch.attend()) < TOLERANCE[torch.bfloat16]
