"""The interface between decoders and attention backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from octavo.worker.shared_runs import SharedRun

Int64Array = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends."""

    scale: float
    """Of the scores."""
    window: int | None = None
    """A query at position i sees keys at i - window + 1 to i. None: all up to i."""
    soft_cap: float = 0.0
    """Scores stay within +- this, by tanh, before the softmax. 0: they are as they are."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the tokens of one step stand, prefill chunks and decodes alike.

    Row i holds `query_lens[i]` consecutive tokens, the last positions of a sequence of `seq_lens[i]` tokens. Tensors
    are on the device; the arrays say the same on the host, so that no backend has to wait for the device.
    """

    slot_mapping: Tensor  # int64 [num_tokens] |-> block_id * block_size + offset in the block
    seq_lens: Tensor  # int32 [num_rows], this step's tokens included
    block_tables: Tensor  # int32 [num_rows, max_num_blocks] |-> block_id; entries past a row's blocks are undefined
    query_lens_on_host: Int64Array  # [num_rows], each at least 1
    seq_lens_on_host: Int64Array  # [num_rows]
    shared_runs: list[SharedRun] = field(default_factory=list)
    """Leading blocks that several rows share: a backend may read them once for all of these rows, or ignore this."""


class StepAttention(ABC):
    """Attention of one step, ready to run for each layer in turn."""

    @abstractmethod
    def forward(self, layer: int, query: Tensor, key_value: Tensor) -> Tensor:
        """Write the tokens' K and V into the layer's slots, then attend to all that each token may see.

        `query` is [num_tokens, num_heads, head_dim], `key_value` [num_tokens, 2, num_kv_heads, head_dim], both turned
        by their positions; neither need be contiguous. Returns [num_tokens, num_heads * head_dim].
        """


class AttentionBackend(ABC):
    """One way to compute attention over the paged pool."""

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> StepAttention:
        """Compute once what all layers of the step share."""
