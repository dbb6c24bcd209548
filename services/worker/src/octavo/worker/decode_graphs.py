"""CUDA graphs of decode steps: the whole model and the sampler, one graph for each size of a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

from octavo.common.errors import InternalError

Step = Callable[[], None]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, ascending: the padding wastes at most an eighth of a large batch."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 1, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Owns the graphs. They share one memory pool, since only one runs at a time."""

    def __init__(self, buckets: list[int]) -> None:
        self.buckets = buckets
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._memory_pool: Any = None
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def bucket_for(self, num_rows: int) -> int | None:
        """The smallest size that holds the rows, or None if none does."""
        place = bisect_left(self.buckets, num_rows)
        return self.buckets[place] if place < len(self.buckets) else None

    def capture(self, step_of: Callable[[int], Step], progress: Callable[[float], None]) -> None:
        """Record `step_of(size)` for each size, largest first, so that the others fit into its memory.

        Each is run once before, so that compiling and choosing of algorithms is done.
        """
        for index, bucket in enumerate(reversed(self.buckets)):
            self.capture_one(bucket, step_of)
            progress((index + 1) / len(self.buckets))

    def capture_one(self, bucket: int, step_of: Callable[[int], Step]) -> None:
        """Record `step_of(bucket)`."""
        step = step_of(bucket)
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        self._memory_pool = self._memory_pool or graph.pool()
        self._graphs[bucket] = graph

    def replay(self, bucket: int) -> None:
        graph = self._graphs.get(bucket)
        if graph is None:
            raise InternalError(f"no graph was captured for {bucket} rows")
        graph.replay()
