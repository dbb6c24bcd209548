"""Attention of a step on a GPU by the kernels of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.worker.attention import LayerAttention
from octavo.worker.kernels.decode_rows import DecodeRows, DecodeScratch, PrefixTiles
from octavo.worker.kernels.many_queries import prefill, prefix
from octavo.worker.kernels.paged_decode import FEW_ITEMS, NewTokens, paged_decode
from octavo.worker.kernels.paged_prefill import PrefillRows
from octavo.worker.kernels.store_kv import store_kv
from octavo.worker.models.gpu_decoder import FusedAttention, Norms


class TritonAttention:
    """What all steps share: the pool by layers, the block tables, the rotary tables."""

    def __init__(
        self,
        pool: Tensor,  # [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]
        tables: Tensor,  # int32 [num_slots, max_blocks_per_seq]
        cos_sin: Sequence[Tensor],  # for each layer float32 [max_model_len, head_dim]
        scratch: DecodeScratch,
        num_heads: int,
        layers: Sequence[LayerAttention],
        norm_eps: float,
        scales: Tensor | None = None,  # float32 [num_layers, 2, num_kv_heads], of an e4m3 pool
    ) -> None:
        self.caches = [pool[:, layer] for layer in range(pool.shape[1])]
        self.tables = tables
        self.cos_sin = list(cos_sin)
        self.scratch = scratch
        self.num_heads = num_heads
        self.layers = tuple(layers)
        self.norm_eps = norm_eps
        self.kv_scales = [None] * pool.shape[1] if scales is None else list(scales.contiguous())


@dataclass(frozen=True, slots=True)
class TritonStep(FusedAttention):
    """One step: where its tokens go, its decode rows, its prefill rows."""

    shared: TritonAttention
    positions: Tensor  # int32 [num_tokens]
    slot_mapping: Tensor  # int64 [num_tokens], -1 for padding
    decodes: DecodeRows | None
    prefixes: PrefixTiles | None
    prefills: PrefillRows | None

    def forward(self, layer: int, heads: Tensor, norms: Norms | None, *, overlaps: bool = False) -> Tensor:
        """See FusedAttention. Padding tokens get undefined values."""
        shared = self.shared
        cache, how, scales = shared.caches[layer], shared.layers[layer], shared.kv_scales[layer]
        cos_sin, eps = shared.cos_sin[layer], shared.norm_eps
        new = NewTokens(cos_sin, self.slot_mapping, norms, eps) if self._is_few_decodes() else None
        if new is None:
            store_kv(heads, cos_sin, self.positions, self.slot_mapping, cache, norms, eps, scales, overlaps=overlaps)
        query = heads[:, : shared.num_heads]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        scale, window, soft_cap = how.scale, how.window, how.soft_cap
        if self.prefills is not None:
            prefill(
                query,
                cache,
                shared.tables,
                self.prefills,
                out,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                scales=scales,
            )
        if self.prefixes is not None:
            prefix(
                query,
                cache,
                shared.tables,
                self.prefixes,
                shared.scratch.prefix,
                scale=scale,
                soft_cap=soft_cap,
                scales=scales,
            )
        if self.decodes is not None:
            paged_decode(
                query,
                cache,
                shared.tables,
                self.decodes,
                shared.scratch,
                out,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                scales=scales,
                new=new,
                overlaps=overlaps,
            )
        return out.view(len(heads), -1)

    def _is_few_decodes(self) -> bool:
        """Then `paged_decode` stores as well. With more rows its programs have enough to wait for besides."""
        if self.decodes is None or self.prefills is not None or self.prefixes is not None:
            return False
        return len(self.decodes.items) <= FEW_ITEMS
