"""CUDA graphs of steps: the whole model and the sampler, one graph for each size of a batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[[], None]

MIN_PREFIX_BUCKET = 8
"""Rows of the smallest decode graph that reads shared prefixes once."""
MIXED_BUCKETS = (*range(32, 513, 32), *range(576, 1025, 64))
"""Tokens of the graphs for mixed rows. Beyond the last one the device takes longer than the launches of its kernels."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph, ascending: the padding wastes at most an eighth of a large batch."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(544, max_num_seqs + 1, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph was captured for."""

    bucket: int
    """Tokens."""
    has_prefixes: bool
    is_mixed: bool = False
    """Rows may have many tokens; else each has one."""


class StepGraphs:
    """Owns the graphs. They share one memory pool, since only one runs at a time."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, has_prefixes: bool) -> None:
        self._buckets = bucket_sizes(max_num_seqs)
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._memory_pool: Any = None
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        keys = [GraphKey(bucket, False) for bucket in self._buckets]
        if has_prefixes:
            keys += [GraphKey(bucket, True) for bucket in self._buckets if bucket >= MIN_PREFIX_BUCKET]
        for with_prefixes in (False, True)[: 1 + has_prefixes]:
            keys += [GraphKey(bucket, with_prefixes, True) for bucket in MIXED_BUCKETS if bucket <= max_num_tokens]
        self.keys = sorted(keys, key=lambda key: -key.bucket)
        """Largest first, so that the later ones fit into the memory of the first."""

    def decode_key(self, num_rows: int, has_prefixes: bool) -> GraphKey | None:
        """The smallest graph that holds the rows of one token, or None if none does or none is captured."""
        at_least = max(num_rows, MIN_PREFIX_BUCKET) if has_prefixes else num_rows
        place = bisect_left(self._buckets, at_least)
        key = GraphKey(self._buckets[place], has_prefixes) if place < len(self._buckets) else None
        return key if key in self._graphs else None

    def mixed_key(self, num_tokens: int, has_prefixes: bool, holds: Callable[[GraphKey], bool]) -> GraphKey | None:
        """The smallest captured graph for mixed rows of so many tokens that `holds` them otherwise, too."""
        for bucket in MIXED_BUCKETS[bisect_left(MIXED_BUCKETS, num_tokens) :]:
            key = GraphKey(bucket, has_prefixes, True)
            if key in self._graphs and holds(key):
                return key
        return None

    def run(self, step: Step) -> None:
        """Run a step where it is to be recorded; once before that, so that the choosing of algorithms is done."""
        with torch.cuda.stream(self._stream):
            step()
        self._stream.synchronize()

    def capture(self, key: GraphKey, step: Step) -> None:
        """Record a step that has been run, and whose kernels are compiled."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool, stream=self._stream, capture_error_mode="thread_local"):
            step()
        self._memory_pool = self._memory_pool or graph.pool()
        self._graphs[key] = graph

    def replay(self, key: GraphKey) -> None:
        """Launch a captured step."""
        self._graphs[key].replay()
