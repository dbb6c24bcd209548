"""Owns the slots of a GPU worker, and turns plans into columns of int32 that reach the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.common.messages.step import RowFlag, StepPlan
from octavo.worker.attention_plan import Prefix, PrefixPlan, cut_prefixes, cut_queries, decode_items, spare_items
from octavo.worker.input_batch import InputBatch
from octavo.worker.kernels.decode_rows import ITEM, MAX_PREFIX_PARTS, PREFIX_SHIFT, TILE
from octavo.worker.slots import StepLimits
from octavo.worker.step_buffer import Int32Array
from octavo.worker.step_columns import MixedColumns, MixedShape, padded

SENT_NOTHING = -1
"""In the place of a token: the one that the slot sampled last."""

MIN_SAVED_TOKENS = 4096
"""Reads of tokens' keys and values, over all rows, that sharing prefixes must save in a step to be worth its launch."""

SPARE_TILES = 16
"""Tiles of queries of a mixed graph beyond those that one long row would fill: each row may leave one half empty."""


class GpuBatch(InputBatch):
    """The slots, their sampling settings as arrays, and the token that each sampled last."""

    def __init__(
        self,
        limits: StepLimits,
        num_kv_heads: int,
        queries_per_tile: int,
        members_per_tile: int,
        shares_prefixes: bool,
        device: torch.device,
    ) -> None:
        super().__init__(limits, device)
        self.last_sampled = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self._num_kv_heads = num_kv_heads
        self._queries_per_tile = queries_per_tile
        self._members_per_tile = members_per_tile
        self._shares_prefixes = shares_prefixes
        self._temperatures = np.zeros(limits.max_num_seqs, dtype=np.float32)
        self._top_ps = np.ones(limits.max_num_seqs, dtype=np.float32)
        self._top_ks = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self._seeds = np.zeros((limits.max_num_seqs, 2), dtype=np.int32)

    def apply_on_host(self, plan: StepPlan) -> tuple[Int32Array, Int32Array]:
        """Closes, opens and table deltas. Returns the places and block ids that the device's tables must be given."""
        self.apply_slots(plan)
        for opened in plan.opened_slots:
            self._temperatures[opened.slot] = opened.temperature
            self._top_ps[opened.slot] = opened.top_p
            self._top_ks[opened.slot] = opened.top_k
            self._seeds[opened.slot] = _halves(opened.seeds[:1])
        places, block_ids = self.tables.append_on_host(plan.table_deltas)
        return np.array(places, dtype=np.int32), np.array(block_ids, dtype=np.int32)

    def decode_columns(self, plan: StepPlan, bucket: int, prefixes: PrefixPlan | None = None) -> list[Int32Array]:
        """A step of `bucket` rows of one token, those beyond the plan's padded; each row draws one token.

        With `prefixes`, of the plan's rows, there are two columns more.
        """
        num_rows = len(plan.slots)
        flags = np.array(plan.flags, dtype=np.int64)
        slots = padded(plan.slots, bucket, -1)
        positions = padded(plan.starts, bucket, 0)
        sent = np.full(num_rows, SENT_NOTHING)
        sent[(flags & RowFlag.FED_BY_LAST_SAMPLE) == 0] = plan.token_ids
        seq_lens = positions + 1
        rows = slots[:num_rows]
        columns = [slots, positions, padded(sent, bucket, 0)]
        columns += self._decode_rows(np.arange(num_rows), rows, seq_lens[:num_rows], bucket, prefixes)
        return [
            *columns,
            np.arange(bucket, dtype=np.int32),
            padded(self._temperatures[rows].view(np.int32), bucket, 0),
            padded(self._top_ps[rows].view(np.int32), bucket, 0),
            padded(self._top_ks[rows], bucket, 0),
            padded(self._seeds[rows].reshape(-1), 2 * bucket, 0),
            seq_lens,
            padded(np.where(flags & RowFlag.SAMPLE, rows, -1), bucket, -1),
        ]

    def decode_lengths(self, bucket: int, has_prefixes: bool) -> list[int]:
        """Lengths of the columns of `decode_columns`."""
        items = [ITEM * (bucket + spare_items(bucket, self._num_kv_heads))]
        prefixes = [bucket, TILE * self.max_prefix_tiles(bucket)] if has_prefixes else []
        return [bucket] * 3 + items + prefixes + [bucket] * 4 + [2 * bucket] + [bucket] * 2

    def max_items(self) -> int:
        """Parts of contexts that a step may have."""
        return self.limits.max_num_seqs + spare_items(self.limits.max_num_seqs, self._num_kv_heads)

    @staticmethod
    def max_prefix_tiles(num_rows: int) -> int:
        """Tiles of shared prefixes that a step of so many decode rows may have."""
        return 32 + num_rows // 16

    def prefixes(self, plan: StepPlan, slots: Sequence[int], seq_lens: Sequence[int]) -> PrefixPlan | None:
        """The shared prefixes of the plan's groups among these decode rows, checked against the tables.

        A group that the tables contradict is ignored, and so are savings that do not pay for the launch.
        """
        if not plan.groups or not self._shares_prefixes:
            return None
        row_of_slot = {slot: row for row, slot in enumerate(slots)}
        found: list[Prefix] = []
        num_saved = 0
        for group in plan.groups:
            rows = [row_of_slot[slot] for slot in group.slots if slot in row_of_slot]
            if len(rows) < 2 or not self._share(group.slots, group.num_blocks):
                continue
            block_size = self.limits.block_size
            num_tokens = min(group.num_blocks, *((seq_lens[row] - 1) // block_size for row in rows)) * block_size
            found.append(Prefix(rows, num_tokens))
            num_saved += (len(rows) - 1) * num_tokens
        if num_saved < MIN_SAVED_TOKENS:
            return None
        return cut_prefixes(
            [prefix for prefix in found if prefix.num_tokens],
            len(slots),
            self._num_kv_heads,
            self._members_per_tile,
            self.max_prefix_tiles(len(slots)),
            MAX_PREFIX_PARTS,
            PREFIX_SHIFT,
        )

    def _share(self, slots: Sequence[int], num_blocks: int) -> bool:
        if any(self.tables.num_entries[slot] < num_blocks for slot in slots):
            return False
        leading = self.tables.on_host[np.array(slots), :num_blocks]
        return bool((leading == leading[0]).all())

    def _decode_rows(
        self,
        tokens: np.ndarray,
        slots: np.ndarray,
        seq_lens: np.ndarray,
        bucket: int,
        prefixes: PrefixPlan | None,
    ) -> list[Int32Array]:
        """The columns of decode rows: items, then members and tiles of shared prefixes if there are any."""
        num_spare = spare_items(bucket, self._num_kv_heads)
        items = decode_items(tokens, slots, seq_lens.astype(np.int64), num_spare, prefixes)
        columns = [padded(items.reshape(-1), ITEM * (bucket + num_spare), 0)]
        if prefixes is not None:
            tiles = prefixes.tiles.copy()
            tiles[:, 2] = slots[tiles[:, 2]]
            columns.append(padded(tokens[prefixes.member_rows], bucket, 0))
            columns.append(padded(tiles.reshape(-1), TILE * self.max_prefix_tiles(bucket), 0))
        return columns

    def mixed_shape(self, num_tokens: int, has_prefixes: bool) -> MixedShape:
        """What a graph of so many tokens has room for: half may be rows of one token, and 128 in any case."""
        num_rows = min(num_tokens, max(128, num_tokens // 2), self.limits.max_num_seqs)
        return MixedShape(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_items=num_rows + spare_items(num_rows, self._num_kv_heads),
            num_tiles=-(-num_tokens // self._queries_per_tile) + SPARE_TILES,
            num_prefix_tiles=self.max_prefix_tiles(num_rows) if has_prefixes else None,
        )

    def mixed_columns(self, plan: StepPlan) -> MixedColumns:
        """A step of any rows."""
        slots, starts, lengths = (np.array(values) for values in (plan.slots, plan.starts, plan.lengths))
        flags = np.array(plan.flags)
        ends = np.cumsum(lengths)
        firsts = ends - lengths
        num_tokens = int(ends[-1])
        row_of_token = np.repeat(np.arange(len(slots)), lengths)
        positions = np.arange(num_tokens) + (starts - firsts)[row_of_token]
        sent = np.full(num_tokens, SENT_NOTHING)
        is_sent = np.ones(num_tokens, dtype=bool)
        is_sent[firsts[(flags & RowFlag.FED_BY_LAST_SAMPLE) != 0]] = False
        sent[is_sent] = plan.token_ids
        seq_lens = starts + lengths
        decodes, prefills = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
        decode_columns: list[Int32Array] = []
        prefill_columns: list[Int32Array] = []
        if len(decodes):
            prefixes = self.prefixes(plan, slots[decodes].tolist(), seq_lens[decodes].tolist())
            decode_columns = self._decode_rows(
                firsts[decodes], slots[decodes], seq_lens[decodes], len(decodes), prefixes
            )
        if len(prefills):
            tiles = cut_queries(lengths[prefills], seq_lens[prefills], self._queries_per_tile)
            prefill_columns = [_int32(values[prefills]) for values in (slots, firsts, lengths, seq_lens)]
            prefill_columns += [_int32(values) for values in tiles]
        return MixedColumns(
            tokens=[_int32(slots[row_of_token]), _int32(positions), _int32(sent)],
            decodes=decode_columns,
            prefills=prefill_columns,
            draws=self._draw_columns(plan, flags, ends),
            num_decodes=len(decodes),
        )

    def _draw_columns(self, plan: StepPlan, flags: np.ndarray, ends: np.ndarray) -> list[Int32Array]:
        sampling = np.flatnonzero(flags & (RowFlag.SAMPLE | RowFlag.FAN_OUT))
        if not len(sampling):
            return []
        slots = np.array(plan.slots)[sampling]
        counts, seeds = np.ones(len(sampling), dtype=np.int64), self._seeds[slots]
        if (flags & RowFlag.FAN_OUT).any():
            drawn = [self.seeds_of_row(plan, int(row)) for row in sampling]
            counts = np.array([len(one) for one in drawn])
            seeds = np.concatenate(drawn)
        draw_slots = np.repeat(slots, counts)
        fed_slots = np.full(len(draw_slots), -1)
        fed_slots[np.cumsum(counts) - counts] = slots
        positions = np.repeat((np.array(plan.starts) + np.array(plan.lengths))[sampling], counts)
        return [
            _int32(ends[sampling] - 1),
            _int32(np.repeat(np.arange(len(sampling)), counts)),
            *self.settings_columns(draw_slots),
            np.ascontiguousarray(seeds).reshape(-1),
            _int32(positions),
            _int32(fed_slots),
        ]

    def settings_columns(self, slots: np.ndarray) -> list[Int32Array]:
        """Temperature, top_p and top_k of each draw, given its slot."""
        return [self._temperatures[slots].view(np.int32), self._top_ps[slots].view(np.int32), self._top_ks[slots]]

    def seeds_of_row(self, plan: StepPlan, row: int) -> Int32Array:
        """[num_seeds, 2]: of each draw of a row that samples."""
        opened = self.slots[plan.slots[row]]
        assert opened is not None
        return _halves(opened.seeds if plan.flags[row] & RowFlag.FAN_OUT else opened.seeds[:1])

    def mark_sampled(self, plan: StepPlan) -> None:
        """The slots of the plan's sampling rows can feed their next rows."""
        for slot, flags in zip(plan.slots, plan.flags, strict=True):
            if flags & (RowFlag.SAMPLE | RowFlag.FAN_OUT):
                self.has_sampled[slot] = True


def _int32(values: np.ndarray) -> Int32Array:
    return values.astype(np.int32)


def _halves(seeds: Sequence[int]) -> Int32Array:
    """[num_seeds, 2]: low and high half of uint64 seeds, as int32."""
    return np.array(seeds, dtype=np.uint64).view(np.int32).reshape(-1, 2)
