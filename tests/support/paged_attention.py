"""A batch of rows over a paged pool that is NaN wherever nothing was written, and what attention makes of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.worker.attention_plan import Prefix, PrefixPlan, cut_prefixes, cut_queries, decode_items
from octavo.worker.attention_torch import to_e4m3
from octavo.worker.kernels.decode_rows import (
    ITEM,
    MAX_PREFIX_PARTS,
    PREFIX_SHIFT,
    TILE,
    DecodeRows,
    PrefixTiles,
    make_scratch,
)
from octavo.worker.kernels.many_queries import prefill, prefix
from octavo.worker.kernels.paged_decode import NewTokens, paged_decode
from octavo.worker.kernels.paged_prefill import PrefillRows, queries_per_tile
from octavo.worker.kernels.paged_prefix import members_per_tile
from octavo.worker.kernels.store_kv import store_kv

NUM_LAYERS = 2
LAYER = 1
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative error in the norm: a few roundings of the weights and of the result."""


@dataclass(frozen=True)
class Shape:
    """What the kernels are compiled for."""

    head_dim: int = 64
    num_kv_heads: int = 2
    group: int = 3
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float = 0.0
    fp8_kv: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


class PagedBatch:
    """Rows of (computed before, queries now), their keys and values scattered over the pool's blocks."""

    def __init__(self, shape: Shape, rows: Sequence[tuple[int, int]], device: str, seed: int = 0) -> None:
        self.shape, self.rows, self.device = shape, list(rows), device
        torch.manual_seed(seed)
        size = shape.block_size
        self.query_lens = np.array([queries for _, queries in rows])
        self.seq_lens = np.array([context + queries for context, queries in rows])
        num_blocks = [-(-int(length) // size) for length in self.seq_lens]
        free = list(range(sum(num_blocks) + 3))
        random.Random(seed).shuffle(free)
        self.tables = torch.full((len(rows), max(num_blocks) + 1), 2**30, dtype=torch.int32)
        pool_shape = (len(free), NUM_LAYERS, 2, shape.num_kv_heads, size, shape.head_dim)
        self.scales = 2.0 ** torch.randint(-6, 3, (2, shape.num_kv_heads), device=device) if shape.fp8_kv else None
        pool_dtype = shape.dtype if self.scales is None else torch.float8_e4m3fn
        self.pool = torch.empty(pool_shape, dtype=pool_dtype, device=device).fill_(torch.nan)
        self.key_values: list[Tensor] = []  # for each row [2, num_kv_heads, seq_len, head_dim]
        for row, length in enumerate(self.seq_lens.tolist()):
            ids = [free.pop() for _ in range(num_blocks[row])]
            self.tables[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            key_value = torch.randn((2, shape.num_kv_heads, length, shape.head_dim), device=device).to(shape.dtype)
            stored = key_value
            if self.scales is not None:
                stored = to_e4m3(key_value, self.scales[:, :, None, None])
                key_value = stored.float() * self.scales[:, :, None, None]
            self.key_values.append(key_value)
            for index, block_id in enumerate(ids):
                part = stored[:, :, index * size : (index + 1) * size]
                self.pool[block_id, LAYER, :, :, : part.shape[2]] = part
        self.tables = self.tables.to(device)
        num_tokens = int(self.query_lens.sum())
        self.query = torch.randn((num_tokens, shape.num_heads, shape.head_dim), device=device).to(shape.dtype)
        self.first_tokens = np.cumsum(self.query_lens) - self.query_lens
        self.prefixes: list[Prefix] = []

    def attend(
        self,
        part_len: int | None = None,
        num_spare: int = 64,
        tiling: tuple[int, int, int] | None = None,
        num_padding_tiles: int = 0,
    ) -> Tensor:
        """What the kernels give: decode rows by one, prefill rows by the other. Rows of no query stay NaN."""
        shape, device = self.shape, self.device
        out = torch.full_like(self.query, torch.nan)
        cache = self.pool[:, LAYER]
        options = {"scale": shape.head_dim**-0.5, "soft_cap": shape.soft_cap, "scales": self.scales}
        decodes = np.flatnonzero(self.query_lens == 1)
        if len(decodes):
            prefixes = self._plan_prefixes(decodes)
            items = decode_items(self.first_tokens[decodes], decodes, self.seq_lens[decodes], num_spare, prefixes)
            if part_len is not None:
                items = split_again(items, part_len)
            padding = np.full((3, ITEM), 2**30)
            padding[:, 6] = 0
            rows = DecodeRows(_int32(np.concatenate((items, padding)), device), prefixes is not None)
            scratch = make_scratch(
                len(items) + 3,
                len(self.query),
                max(1, len(decodes)),
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                torch.device(device),
            )
            scratch.partial.fill_(torch.nan)
            scratch.prefix.partial.fill_(torch.nan)
            if prefixes is not None:
                tiles = prefixes.tiles.copy()
                tiles[:, 2] = decodes[tiles[:, 2]]
                prefix(
                    self.query,
                    cache,
                    self.tables,
                    PrefixTiles(
                        _int32(self.first_tokens[decodes][prefixes.member_rows], device),
                        _int32(np.concatenate((tiles, np.zeros((2, TILE)))), device),
                    ),
                    scratch.prefix,
                    **options,  # type: ignore[arg-type]
                )
            for _ in range(2):  # the second launch finds what the first left in the scratch
                paged_decode(
                    self.query, cache, self.tables, rows, scratch, out, window=shape.window, tiling=tiling, **options
                )  # type: ignore[arg-type]
        prefills = np.flatnonzero(self.query_lens > 1)
        if len(prefills):
            tile_rows, tile_parts = cut_queries(
                self.query_lens[prefills], self.seq_lens[prefills], queries_per_tile(shape.group, shape.head_dim)
            )
            padding = [0] * num_padding_tiles  # tiles of a row without queries, as in a step that is a graph
            no_row = [0] * bool(padding)
            chunks = PrefillRows(
                slots=_int32(np.append(prefills, no_row), device),
                tokens=_int32(np.append(self.first_tokens[prefills], no_row), device),
                query_lens=_int32(np.append(self.query_lens[prefills], no_row), device),
                seq_lens=_int32(np.append(self.seq_lens[prefills], no_row), device),
                tile_rows=_int32(np.append(tile_rows, np.full(num_padding_tiles, len(prefills))), device),
                tile_parts=_int32(np.append(tile_parts, padding), device),
            )
            prefill(self.query, cache, self.tables, chunks, out, window=shape.window, **options)  # type: ignore[arg-type]
        return out

    def store_and_attend(self, *, in_one_launch: bool, has_norms: bool, part_len: int = 64) -> tuple[Tensor, Tensor]:
        """Decode rows, given the heads as a projection makes them. Returns what comes out, and each row's new key and
        value as the pool holds them, float32 [num_rows, 2, num_kv_heads, head_dim]."""
        shape, device, num_rows = self.shape, self.device, len(self.rows)
        torch.manual_seed(7)
        heads = torch.randn((num_rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim), device=device)
        heads = heads.to(shape.dtype)
        norms = None
        if has_norms:
            norms = (torch.rand(shape.head_dim, device=device), torch.rand(shape.head_dim, device=device))
        positions = torch.from_numpy(self.seq_lens - 1).to(device)
        angles = torch.rand((int(self.seq_lens.max()), shape.head_dim // 2), device=device) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        rows, size = torch.arange(num_rows, device=device), shape.block_size
        block_ids, offsets = self.tables[rows, positions // size].long(), positions % size
        slot_mapping = block_ids * size + offsets
        pool = self.pool.clone()
        cache = pool[:, LAYER]
        nan = torch.full((num_rows, 2, shape.num_kv_heads, shape.head_dim), torch.nan, device=device)
        cache[block_ids, :, :, offsets] = nan.to(pool.dtype)
        new = NewTokens(cos_sin, slot_mapping, norms, 1e-5) if in_one_launch else None
        if not in_one_launch:
            int_positions = positions.to(torch.int32)
            store_kv(heads, cos_sin, int_positions, slot_mapping, cache, norms, 1e-5, self.scales)
        query = heads[:, : shape.num_heads]
        out = torch.full(query.shape, torch.nan, dtype=shape.dtype, device=device)
        items = split_again(decode_items(np.arange(num_rows), np.arange(num_rows), self.seq_lens, 64), part_len)
        padding = np.full((3, ITEM), 2**30)
        padding[:, 6] = 0
        scratch = make_scratch(
            len(items), num_rows, 1, shape.num_heads, shape.num_kv_heads, shape.head_dim, torch.device(device)
        )
        paged_decode(
            query,
            cache,
            self.tables,
            DecodeRows(_int32(np.concatenate((items, padding)), device)),
            scratch,
            out,
            scale=shape.head_dim**-0.5,
            window=shape.window,
            soft_cap=shape.soft_cap,
            scales=self.scales,
            new=new,
        )
        return out.float(), cache[block_ids, :, :, offsets].float()

    def share(self, rows: Sequence[int], num_blocks: int) -> None:
        """Let rows share their leading blocks, of the first one's contents."""
        num_tokens = num_blocks * self.shape.block_size
        for row in rows[1:]:
            self.tables[row, :num_blocks] = self.tables[rows[0], :num_blocks]
            self.key_values[row][:, :, :num_tokens] = self.key_values[rows[0]][:, :, :num_tokens]
        self.prefixes.append(Prefix(list(rows), num_tokens))

    def _plan_prefixes(self, decodes: np.ndarray) -> PrefixPlan | None:
        row_of = {int(row): index for index, row in enumerate(decodes)}
        prefixes = [Prefix([row_of[row] for row in one.rows], one.num_tokens) for one in self.prefixes]
        members = members_per_tile(self.shape.group, self.shape.head_dim)
        return cut_prefixes(
            prefixes, len(decodes), self.shape.num_kv_heads, members, 64, MAX_PREFIX_PARTS, PREFIX_SHIFT
        )

    def expected(self) -> Tensor:
        """Plain attention in float32, row by row."""
        shape = self.shape
        out = torch.empty_like(self.query, dtype=torch.float32)
        for row, (context, queries) in enumerate(self.rows):
            first = int(self.first_tokens[row])
            query = self.query[first : first + queries].float().transpose(0, 1)  # [num_heads, queries, head_dim]
            keys, values = (part.float().repeat_interleave(shape.group, 0) for part in self.key_values[row])
            scores = query @ keys.transpose(1, 2) * shape.head_dim**-0.5
            if shape.soft_cap:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            positions = torch.arange(context, context + queries, device=self.device)[:, None]
            key_positions = torch.arange(context + queries, device=self.device)
            seen = key_positions <= positions
            if shape.window is not None:
                seen &= key_positions > positions - shape.window
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first : first + queries] = (weights @ values).transpose(0, 1)
        return out

    def error(self, out: Tensor) -> float:
        """Relative error in the norm; NaN if anything was left unwritten or read that was never written."""
        expected = self.expected()
        return float((out.float() - expected).norm() / expected.norm())


def split_again(items: np.ndarray, part_len: int) -> np.ndarray:
    """The same rows in parts of another length."""
    made = []
    for item in items[items[:, 5] == 0]:
        begin, seq_len = item[2], item[4]
        num_parts = -(-(seq_len - begin) // part_len)
        for part in range(num_parts):
            first = begin + part * part_len
            made.append([*item[:2], first, min(first + part_len, seq_len), seq_len, part, num_parts, item[7]])
    return np.array(made)


def _int32(values: np.ndarray, device: str) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device)
