"""The KV pool: one tensor, block-major, its type, and how large it may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.common.messages.kv import BlockCopy
from octavo.worker.block_transfers import new_transfers
from octavo.worker.config import WorkerConfig
from octavo.worker.free_memory import free_host_bytes
from octavo.worker.models.config import ModelConfig

DEFAULT_SHARE_OF_FREE_MEMORY = 0.25
DEFAULT_MAX_BYTES = 4 * 2**30
DEFAULT_MAX_HOST_BYTES = 2 * 2**30
DEFAULT_MAX_PINNED_BYTES = 8 * 2**30
"""The same beside a GPU, whose pool is larger and is not host memory itself."""


class KvCache:
    """Owns the pool. All layers of a block are one contiguous piece, so that a copy moves it whole.

    The memory starts undefined: whoever reads it must know which slots were written. A pool of e4m3 has scales.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        scales: Tensor | None = None,
    ) -> None:
        """`scales`, float32 [num_layers, 2, num_kv_heads], are what stored K and V are to be multiplied by."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, model.num_layers, 2, model.num_kv_heads, block_size, model.head_dim)
        self.pool = torch.empty(shape, dtype=dtype, device=device)
        self.scales = scales
        self.transfers = new_transfers(self.pool, num_host_blocks)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, in order: a later copy sees what an earlier one wrote."""
        for copy in copies:
            self.pool[copy.target_id].copy_(self.pool[copy.source_id])


def kv_dtype(config: WorkerConfig, model_dtype: torch.dtype) -> torch.dtype:
    """What the pool stores."""
    return model_dtype if config.kv_cache_dtype == "auto" else torch.float8_e4m3fn


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of one block over all layers."""
    return model.num_layers * 2 * model.num_kv_heads * block_size * model.head_dim * dtype.itemsize


def default_kv_cache_bytes(most_useful: int) -> int:
    """A size on a CPU that leaves room for everything else: never more than `most_useful` bytes."""
    limit = min(DEFAULT_MAX_BYTES, int(DEFAULT_SHARE_OF_FREE_MEMORY * free_host_bytes()))
    return min(most_useful, limit)


def default_host_cache_bytes(pool_bytes: int, device: torch.device) -> int:
    """As much as the pool has, within a share of what the machine has left beside the pool."""
    on_host, limit = (pool_bytes, DEFAULT_MAX_HOST_BYTES) if device.type == "cpu" else (0, DEFAULT_MAX_PINNED_BYTES)
    share = int(DEFAULT_SHARE_OF_FREE_MEMORY * max(0, free_host_bytes() - on_host))
    return min(pool_bytes, limit, share)


def num_host_blocks_of(config: WorkerConfig, num_blocks: int, bytes_each: int, device: torch.device) -> int:
    """Blocks of host memory beside a pool of `num_blocks` blocks on the device, as the settings say."""
    if config.num_host_blocks is not None:
        return config.num_host_blocks
    host_bytes = config.host_cache_bytes
    if host_bytes is None:
        host_bytes = default_host_cache_bytes(num_blocks * bytes_each, device)
    return host_bytes // bytes_each
