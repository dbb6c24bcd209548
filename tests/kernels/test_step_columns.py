"""A step of mixed rows padded to the size of a graph: it computes, stores and draws what the step itself does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from octavo.common.messages.step import OpenSlot, RowFlag, SharingGroup, StepPlan, TableDelta
from octavo.worker.attention import LayerAttention
from octavo.worker.attention_triton import TritonAttention, TritonStep
from octavo.worker.gpu_batch import GpuBatch
from octavo.worker.kernels.decode_rows import make_scratch
from octavo.worker.kernels.paged_prefill import queries_per_tile
from octavo.worker.kernels.paged_prefix import members_per_tile
from octavo.worker.kernels.sample import sample
from octavo.worker.kernels.step_inputs import locate_tokens
from octavo.worker.models.rotary import cos_sin_table
from octavo.worker.slots import StepLimits
from octavo.worker.step_columns import NO_COLUMNS, MixedColumns

pytestmark = pytest.mark.filterwarnings(  # a tile without queries divides nothing by nothing, and stores nothing
    "ignore:divide by zero", "ignore:invalid value", "ignore:overflow"
)

BLOCK_SIZE, NUM_BLOCKS = 16, 24
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
VOCAB_SIZE = 96
SAMPLE, FAN_OUT = RowFlag.SAMPLE, RowFlag.FAN_OUT


class OneLayer:
    """Attention and the sampler, on random heads and logits."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        limits = StepLimits(NUM_BLOCKS, BLOCK_SIZE, 8, 512, 128, VOCAB_SIZE)
        group = NUM_HEADS // NUM_KV_HEADS
        self.batch = GpuBatch(
            limits,
            NUM_KV_HEADS,
            queries_per_tile(group, HEAD_DIM),
            members_per_tile(group, HEAD_DIM),
            True,
            self.device,
        )
        torch.manual_seed(0)
        self.pool = torch.randn((NUM_BLOCKS, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), device=device)
        self.attention = TritonAttention(
            self.pool,
            self.batch.tables.on_device,
            [cos_sin_table(None, HEAD_DIM, 128, self.device)],
            make_scratch(self.batch.max_items(), 512, 8, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, self.device),
            NUM_HEADS,
            [LayerAttention(HEAD_DIM**-0.5, None, 0.0)],
            1e-6,
        )

    def open(self, plan: StepPlan) -> None:
        self.batch.apply_on_host(plan)
        self.batch.tables.on_device.copy_(torch.from_numpy(self.batch.tables.on_host))

    def run(self, mixed: MixedColumns, num_tokens: int) -> tuple[Tensor, Tensor, list[int], Tensor]:
        """Attention of the step's tokens, the pool after it, the tokens drawn, what the slots are fed."""
        columns = mixed.on_device([torch.from_numpy(column.copy()).to(self.device) for column in mixed.columns])
        all_tokens = len(columns.tokens.slots)
        token_ids = torch.zeros(all_tokens, dtype=torch.int32, device=self.device)
        slot_mapping = torch.zeros(all_tokens, dtype=torch.int64, device=self.device)
        tokens, last_sampled = columns.tokens, torch.full((8,), 7, dtype=torch.int32, device=self.device)
        tables = self.batch.tables.on_device
        locate_tokens(
            tokens.slots, tokens.positions, tokens.sent, last_sampled, tables, BLOCK_SIZE, token_ids, slot_mapping
        )
        heads = torch.full((all_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), torch.nan, device=self.device)
        heads[:num_tokens] = torch.randn(heads[:num_tokens].shape, generator=torch.manual_seed(5)).to(self.device)
        kept = self.pool.clone()
        step = TritonStep(
            self.attention, tokens.positions, slot_mapping, columns.decodes, columns.prefixes, columns.prefills
        )
        attended = step.forward(0, heads, None)[:num_tokens]
        stored = self.pool.clone()
        self.pool.copy_(kept)
        drawn: list[int] = []
        if columns.draws is not None and columns.drawn_tokens is not None:
            logits = torch.randn((512, VOCAB_SIZE), generator=torch.manual_seed(6)).to(self.device)
            places = torch.zeros(len(columns.draws.rows), dtype=torch.int32, device=self.device)
            sample(logits.index_select(0, columns.drawn_tokens), columns.draws, last_sampled, places)
            drawn = places.tolist()
        return attended, stored, drawn, last_sampled


def opening(slot: int, seeds: Sequence[int] = (3,), temperature: float = 0.0) -> OpenSlot:
    return OpenSlot(slot, slot, tuple(seeds), temperature, 1.0, 0, None)


def tables(*block_ids: Sequence[int]) -> list[TableDelta]:
    return [TableDelta(slot, 0, tuple(ids), (0,) * len(ids)) for slot, ids in enumerate(block_ids)]


def rows(**columns: list[int]) -> StepPlan:
    return StepPlan(step_id=2, token_ids=list(range(sum(columns["lengths"]))), **columns)


@pytest.mark.parametrize(
    ("plan", "num_draws"),
    [
        (rows(slots=[0, 1, 2, 3], starts=[40, 0, 17, 33], lengths=[1, 45, 1, 7], flags=[SAMPLE] * 4), 4),
        (rows(slots=[1], starts=[0], lengths=[30], flags=[RowFlag.NONE]), 0),
        (rows(slots=[3, 0], starts=[16, 1], lengths=[2, 3], flags=[FAN_OUT, SAMPLE]), 4),
    ],
    ids=["decodes beside chunks", "a chunk that draws nothing", "several draws of a row"],
)
def test_a_padded_step_computes_stores_and_draws_the_same(plan: StepPlan, num_draws: int, device: str) -> None:
    layer = OneLayer(device)
    opened = [opening(0), opening(1), opening(2, temperature=1.0), opening(3, seeds=(1, 2, 9), temperature=1.0)]
    layer.open(
        StepPlan(step_id=1, opened_slots=opened, table_deltas=tables((5, 0, 9), (7, 3, 11), (2, 14), (13, 20, 21, 22)))
    )
    mixed, shape, num_tokens = layer.batch.mixed_columns(plan), layer.batch.mixed_shape(64, False), sum(plan.lengths)

    assert shape.holds(mixed)
    expected = layer.run(mixed, num_tokens)
    padded = layer.run(mixed.padded(shape), num_tokens)

    torch.testing.assert_close(padded[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(padded[1], expected[1])
    assert len(expected[2]) == num_draws
    assert padded[2][:num_draws] == expected[2]
    assert torch.equal(padded[3], expected[3])


def test_a_padded_step_reads_shared_prefixes_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.gpu_batch.MIN_SAVED_TOKENS", 1)
    layer = OneLayer(device)
    layer.open(
        StepPlan(
            step_id=1,
            opened_slots=[opening(slot) for slot in range(3)],
            table_deltas=tables((5, 0, 9), (5, 0, 4), (2, 14)),
        )
    )
    plan = rows(slots=[0, 1, 2], starts=[40, 34, 0], lengths=[1, 1, 20], flags=[SAMPLE] * 3)
    plan.groups.append(SharingGroup((0, 1), 2))
    mixed, shape = layer.batch.mixed_columns(plan), layer.batch.mixed_shape(32, True)

    assert mixed.has_prefixes
    assert shape.holds(mixed)
    torch.testing.assert_close(layer.run(mixed.padded(shape), 22)[0], layer.run(mixed, 22)[0], rtol=1e-5, atol=1e-5)


def test_a_shape_holds_no_more_than_it_has_room_for(device: str) -> None:
    layer = OneLayer(device)
    layer.open(
        StepPlan(step_id=1, opened_slots=[opening(slot) for slot in range(8)], table_deltas=tables(*([[0]] * 8)))
    )
    chunks = layer.batch.mixed_columns(rows(slots=[0, 1], starts=[0, 0], lengths=[16, 16], flags=[SAMPLE] * 2))
    decodes = rows(slots=list(range(8)), starts=[3] * 8, lengths=[1] * 8, flags=[SAMPLE] * 8)

    shape = layer.batch.mixed_shape(32, False)

    assert shape.holds(chunks)
    assert not layer.batch.mixed_shape(31, False).holds(chunks)
    assert not layer.batch.mixed_shape(32, True).holds(chunks)
    assert shape.holds(layer.batch.mixed_columns(decodes))
    assert not layer.batch.mixed_shape(7, False).holds(layer.batch.mixed_columns(decodes))


def test_a_step_of_padding_alone_touches_nothing(device: str) -> None:
    """As graphs are captured."""
    layer = OneLayer(device)

    _, stored, _, _ = layer.run(NO_COLUMNS.padded(layer.batch.mixed_shape(32, True)), 0)

    assert torch.equal(stored, layer.pool)
    assert not layer.attention.scratch.arrivals.any()
