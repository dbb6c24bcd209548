"""Scales of a KV pool that stores e4m3: a stored value times its scale is the value."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch
from torch import Tensor

from octavo.worker.attention import AttentionMetadata
from octavo.worker.attention_torch import TorchAttention
from octavo.worker.kv_cache import KvCache
from octavo.worker.models.causal_lm import CausalLm

NUM_TOKENS = 256
"""Tokens of the calibration pass."""
HEADROOM = 2.0
"""How much larger than any of the calibration pass a value may be that is stored without loss, at least."""
BLOCK_SIZE = 16


@torch.inference_mode()
def calibrate(model: CausalLm, seed: int = 0) -> Tensor:
    """Scales by one pass over random tokens: float32 [num_layers, 2, num_kv_heads], K then V, each a power of two.

    Since e4m3 is a floating-point type, the headroom costs no precision: values down to 1/7,000 of the largest one
    seen keep four significant bits.
    """
    config, device = model.config, model.device
    num_tokens = min(NUM_TOKENS, config.max_position_embeddings)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    kv_cache = KvCache(config, num_blocks, BLOCK_SIZE, model.dtype, device)
    kv_cache.pool.zero_()
    lens = np.array([num_tokens])
    positions = torch.arange(num_tokens, device=device)
    metadata = AttentionMetadata(
        slot_mapping=positions,
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        query_lens_on_host=lens,
        seq_lens_on_host=lens,
    )
    attention = TorchAttention(kv_cache.pool, config.num_heads, config.attention)
    token_ids = torch.randint(config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    model.forward(token_ids.to(device), positions, attention.prepare(metadata))
    return scales_for(kv_cache.pool.abs().amax((0, 4, 5)).float())


def kv_format(dtype: torch.dtype, scales: Tensor | None) -> str:
    """Names what the bytes of a block mean: the same bytes under other scales are other keys and values."""
    name = str(dtype).removeprefix("torch.")
    return name if scales is None else f"{name}/{sha256(scales.cpu().numpy().tobytes()).hexdigest()[:16]}"


def scales_for(largest: Tensor) -> Tensor:
    """The least powers of two that leave HEADROOM above the largest magnitudes, and 1 where nothing is known."""
    limit = torch.finfo(torch.float8_e4m3fn).max / HEADROOM
    is_known = (largest > 0) & largest.isfinite()
    return torch.where(is_known, torch.exp2((largest / limit).log2().ceil()), torch.ones_like(largest))
