"""How much of a GPU's memory the KV pool may take, and where the rest goes."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.worker.models.errors import ModelLoadError

GIB = 2**30
CONTEXT_BYTES = 3 * 2**28
"""What the driver takes for a process, about; nobody says it exactly."""
USABLE_SHARE = 0.98
"""Of the total: the rest is left for what comes and goes."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All in bytes, of one GPU."""

    total: int
    utilization: float
    """Share of the total that this process may take for itself."""
    others: int
    """Taken by other processes, and by the driver for this one, at the time."""
    weights: int
    activations: int
    """The most that a step of the largest size needs beside weights and pool, buffers of steps included."""
    graphs: int

    @property
    def kv_pool(self) -> int:
        """What is left of the share, which neighbours do not change, but at most what they leave. May be negative."""
        return min(self._left_of_share, self._left_by_others)

    @property
    def _left_of_share(self) -> int:
        return int(self.total * self.utilization) - min(self.others, CONTEXT_BYTES) - self._own

    @property
    def _left_by_others(self) -> int:
        return int(self.total * USABLE_SHARE) - self.others - self._own

    @property
    def _own(self) -> int:
        return self.weights + self.activations + self.graphs

    def num_blocks(self, block_bytes: int, blocks_of_longest: int) -> int:
        """Blocks that fit. Raises ModelLoadError, which says what to set, if the longest sequence would not."""
        num_blocks = max(self.kv_pool, 0) // block_bytes
        if num_blocks >= blocks_of_longest:
            return num_blocks
        needed_bytes = blocks_of_longest * block_bytes
        needed = self.utilization + (needed_bytes - self._left_of_share) / self.total
        if num_blocks > 0:
            remedy = f"set max_model_len to at most {num_blocks} times the block size"
        else:
            remedy = "use a smaller model or dtype, or lower max_num_batched_tokens or max_num_seqs"
        neighbours = max(0, self.others - CONTEXT_BYTES)
        if self._left_by_others < needed_bytes <= self._left_by_others + neighbours:
            remedy = f"end other processes, which hold about {neighbours / GIB:.1f} GiB, or {remedy}"
        elif needed < USABLE_SHARE:
            remedy = f"set gpu_memory_utilization to at least {needed:.2f}, or {remedy}"
        raise ModelLoadError(
            f"the GPU has room for {num_blocks} KV blocks, the longest sequence needs {blocks_of_longest}: {remedy}. "
            f"Memory: {self.describe()}"
        )

    def describe(self) -> str:
        """Where each GiB goes."""
        parts = {
            "total": self.total,
            "allowed": int(self.total * self.utilization),
            "other processes and driver": self.others,
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "KV pool": max(self.kv_pool, 0),
        }
        return ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in parts.items())
