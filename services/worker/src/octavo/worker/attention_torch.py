"""The torch reference backend: paged attention on any device, for any head size and ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.worker.attention import AttentionBackend, AttentionMetadata, Int64Array, LayerAttention, StepAttention


class TorchAttention(AttentionBackend):
    """Reads the pool by block tables.

    All decode rows of a step are computed together over the ragged list of their blocks: one gather a layer, no row
    padded to another's length. Each prefill chunk gathers its own sequence's blocks and attends alone.
    """

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        layers: Sequence[LayerAttention],
        scales: Tensor | None = None,
    ) -> None:
        """`pool` is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.

        `layers` says how each layer attends. `scales`, float32 [num_layers, 2, num_kv_heads], belong to an e4m3
        pool: what stored K and V are to be multiplied by.
        """
        self.pool = pool
        self.num_heads = num_heads
        self.layers = tuple(layers)
        self.scales = scales

    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        """See AttentionBackend."""
        return _TorchStep(self, metadata)


class _TorchStep(StepAttention):
    def __init__(self, backend: TorchAttention, metadata: AttentionMetadata) -> None:
        pool, self._num_heads = backend.pool, backend.num_heads
        block_size = pool.shape[4]
        self._pool = pool
        self._layers = backend.layers
        self._scales = backend.scales
        self._block_ids = metadata.slot_mapping // block_size
        self._offsets = metadata.slot_mapping % block_size

        query_lens = metadata.query_lens_on_host
        first_tokens = np.cumsum(query_lens) - query_lens
        decode_rows = np.flatnonzero(query_lens == 1)
        self._all_decode = len(decode_rows) == len(query_lens)
        self._decode_tokens = torch.from_numpy(first_tokens[decode_rows]).to(pool.device)
        self._decodes: dict[int | None, _Decodes] = {}
        self._chunks: dict[int | None, list[_Chunk]] = {}
        for window in dict.fromkeys(layer.window for layer in self._layers):
            if len(decode_rows):
                self._decodes[window] = _list_decodes(pool, metadata, decode_rows, self._num_heads, window)
            self._chunks[window] = [
                _list_chunk(pool, metadata, int(row), int(first_tokens[row]), window)
                for row in np.flatnonzero(query_lens > 1)
            ]

    def forward(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """See StepAttention."""
        slots = self._pool[:, layer].permute(0, 3, 1, 2, 4)  # [num_blocks, block_size, 2, num_kv_heads, head_dim]
        if self._scales is None:
            slots[self._block_ids, self._offsets] = key_value
            return self._attend(layer, query).flatten(1)
        scales = self._scales[layer]
        slots[self._block_ids, self._offsets] = to_e4m3(key_value, scales[:, :, None])
        # A dot product of queries and keys, and a weighted sum of values, may be scaled as well before or after.
        by_head = scales.repeat_interleave(self._num_heads // scales.shape[1], 1)[:, :, None]
        attended = self._attend(layer, (query * by_head[0]).to(query.dtype))
        return (attended * by_head[1]).flatten(1).to(query.dtype)

    def _attend(self, layer: int, query: Tensor) -> Tensor:
        """Both are [num_tokens, num_heads, head_dim]."""
        how = self._layers[layer]
        if self._all_decode:
            return self._decodes[how.window].attend(self._pool, layer, query, how)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if how.window in self._decodes:
            decoded = self._decodes[how.window].attend(self._pool, layer, query[self._decode_tokens], how)
            out.index_copy_(0, self._decode_tokens, decoded)
        for chunk in self._chunks[how.window]:
            chunk.attend(self._pool, layer, query, out, how)
        return out


def to_e4m3(values: Tensor, scales: Tensor) -> Tensor:
    """The values divided by their scales; what does not fit then becomes the type's largest value."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return (values / scales).clamp_(-largest, largest).to(torch.float8_e4m3fn)


def _capped(products: Tensor, how: LayerAttention) -> Tensor:
    """Scores within the layer's soft cap, from products of queries and keys, which are overwritten."""
    return products.mul_(how.scale / how.soft_cap).tanh_().mul_(how.soft_cap)


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The blocks of all decode rows, one after the other: a row with n visible blocks takes n places of num_places."""

    num_rows: int
    row_of_place: Tensor  # int64 [num_places]
    pool_rows: (
        Tensor  # int64 [num_layers, 2 * num_places] |-> row of the pool seen as [-1, heads * block * dim]; K, then V
    )
    hidden_slots: Tensor  # int64 |-> gathered slots, seen as [-1, head_dim], that no query may see
    mask: Tensor  # float32 [num_places * num_kv_heads, 1, block_size], 0 or -inf

    def attend(self, pool: Tensor, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """`query` is [num_rows, num_heads, head_dim]; so is the result."""
        num_kv_heads, block_size, head_dim = pool.shape[3:]
        num_places = len(self.row_of_place)
        gathered = (
            pool.view(-1, num_kv_heads * block_size * head_dim).index_select(0, self.pool_rows[layer]).to(query.dtype)
        )
        # Slots that were never written may hold NaN, which no mask undoes.
        gathered.view(-1, head_dim).index_fill_(0, self.hidden_slots, 0.0)
        keys, values = gathered.view(2, num_places * num_kv_heads, block_size, head_dim)

        num_heads = query.shape[1]
        queries = query.index_select(0, self.row_of_place)
        queries = queries.view(num_places * num_kv_heads, num_heads // num_kv_heads, head_dim)
        mask = self.mask.to(query.dtype)
        if how.soft_cap:
            scores = _capped(torch.bmm(queries, keys.transpose(1, 2)), how).add_(mask)
        else:
            scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=how.scale)
        scores = scores.view(num_places, num_heads, block_size)

        largest = scores.new_full((self.num_rows, num_heads), -torch.inf)
        rows = self.row_of_place.unsqueeze(-1).expand(-1, num_heads)
        largest.scatter_reduce_(0, rows, scores.amax(-1), "amax")
        weights = scores.sub_(largest.index_select(0, self.row_of_place).unsqueeze(-1)).exp_()
        total = scores.new_zeros((self.num_rows, num_heads)).index_add_(0, self.row_of_place, weights.sum(-1))
        parts = torch.bmm(weights.view(num_places * num_kv_heads, -1, block_size), values)
        out = query.new_zeros(query.shape).index_add_(0, self.row_of_place, parts.view(num_places, num_heads, head_dim))
        return out.div_(total.unsqueeze(-1))


def _list_decodes(
    pool: Tensor, metadata: AttentionMetadata, rows: Int64Array, num_heads: int, window: int | None
) -> _Decodes:
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    seq_lens = metadata.seq_lens_on_host[rows]
    first_seen = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
    first_blocks = first_seen // block_size
    num_places = (seq_lens - 1) // block_size - first_blocks + 1
    row_of_place = np.repeat(np.arange(len(rows)), num_places)
    place_in_row = np.arange(len(row_of_place)) - np.repeat(np.cumsum(num_places) - num_places, num_places)
    columns = place_in_row + first_blocks[row_of_place]

    positions = columns[:, None] * block_size + np.arange(block_size)  # [num_places, block_size]
    seen = (positions < seq_lens[row_of_place, None]) & (positions >= first_seen[row_of_place, None])
    hidden = np.broadcast_to(~seen[None, :, None, :], (2, len(columns), num_kv_heads, block_size))
    mask = np.where(seen, np.float32(0), np.float32(-np.inf))
    mask = np.repeat(mask, num_kv_heads, axis=0)[:, None, :]

    device = pool.device
    table_rows = torch.from_numpy(rows[row_of_place]).to(device)
    block_ids = metadata.block_tables[table_rows, torch.from_numpy(columns).to(device)].to(torch.int64)
    keys = block_ids * (2 * num_layers)
    layers = torch.arange(num_layers, device=device)[:, None]
    return _Decodes(
        num_rows=len(rows),
        row_of_place=torch.from_numpy(row_of_place).to(device),
        pool_rows=torch.cat((keys, keys + 1)) + 2 * layers,
        hidden_slots=torch.from_numpy(np.flatnonzero(hidden)).to(device),
        mask=torch.from_numpy(mask).to(device),
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prefill chunk: the positions `first_token` to `end_token` of the step are one sequence's last ones."""

    first_token: int
    end_token: int
    num_seen: int  # positions that any of its queries may see
    num_skipped: int  # positions of the first gathered block that lie before them
    pool_rows: Tensor  # int64 [2 * num_kv_heads * num_blocks] |-> row of layer 0 of the pool seen as [-1, block * dim]
    mask: Tensor | None  # bool [num_queries, num_seen]; None: causal from position 0 on

    def attend(self, pool: Tensor, layer: int, query: Tensor, out: Tensor, how: LayerAttention) -> None:
        """Fill the chunk's rows of `out`; both are [num_tokens, num_heads, head_dim]."""
        num_kv_heads, block_size, head_dim = pool.shape[3:]
        rows = self.pool_rows + 2 * num_kv_heads * layer
        gathered = pool.view(-1, block_size * head_dim).index_select(0, rows).to(query.dtype)
        seen = slice(self.num_skipped, self.num_skipped + self.num_seen)
        keys, values = gathered.view(2, 1, num_kv_heads, -1, head_dim)[:, :, :, seen]
        queries = query[self.first_token : self.end_token].transpose(0, 1).unsqueeze(0)
        if how.soft_cap:
            attended = self._attend_capped(queries[0], keys[0], values[0], how)
        else:
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=self.mask,
                is_causal=self.mask is None,
                scale=how.scale,
                enable_gqa=True,
            )[0]
        out[self.first_token : self.end_token] = attended.transpose(0, 1)

    def _attend_capped(self, queries: Tensor, keys: Tensor, values: Tensor, how: LayerAttention) -> Tensor:
        """Queries and result are [num_heads, num_queries, head_dim]; the others [num_kv_heads, num_seen, head_dim]."""
        _, num_queries, head_dim = queries.shape
        grouped = queries.reshape(len(keys), -1, num_queries, head_dim)
        scores = _capped(grouped @ keys.transpose(1, 2).unsqueeze(1), how)
        seen = self.mask
        if seen is None:
            seen = torch.ones((num_queries, num_queries), dtype=torch.bool, device=queries.device).tril()
        weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
        return (weights @ values.unsqueeze(1)).flatten(0, 1)


def _list_chunk(pool: Tensor, metadata: AttentionMetadata, row: int, first_token: int, window: int | None) -> _Chunk:
    _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
    num_queries, seq_len = int(metadata.query_lens_on_host[row]), int(metadata.seq_lens_on_host[row])
    start = seq_len - num_queries
    first_seen = 0 if window is None else max(0, start - window + 1)
    first_block, end_block = first_seen // block_size, (seq_len - 1) // block_size + 1

    device = pool.device
    block_ids = metadata.block_tables[row, first_block:end_block].to(torch.int64)
    heads = torch.arange(2 * num_kv_heads, device=device)[:, None]
    mask = None
    if start or (window is not None and window < seq_len):
        positions = torch.arange(start, seq_len, device=device)[:, None]
        keys = torch.arange(first_seen, seq_len, device=device)
        mask = keys <= positions
        if window is not None:
            mask &= keys > positions - window
    return _Chunk(
        first_token=first_token,
        end_token=first_token + num_queries,
        num_seen=seq_len - first_seen,
        num_skipped=first_seen - first_block * block_size,
        pool_rows=(heads + block_ids * (2 * num_layers * num_kv_heads)).flatten(),
        mask=mask,
    )
