"""How kernels are timed here, and the two limits of the GPU they are held against."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch


def time_us(launch: Callable[[], object], repeats: int = 20, launches_per_graph: int = 1) -> float:
    """Median microseconds of one launch: `launch` is captured in a graph, whose replays are timed on the device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1000 / launches_per_graph


@dataclass(frozen=True)
class Limits:
    """Measured on the device in the same run."""

    copy_bytes_per_s: float
    """Of a large copy, bytes read and bytes written."""
    matmul_flops: float
    """Of a bfloat16 product of 8192 x 8192 x 8192, random data."""


def measure_limits() -> Limits:
    copy_us = _time_copy_us()
    a = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    b = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    matmul_us = time_us(lambda: torch.mm(a, b, out=out))
    return Limits(copy_bytes_per_s=2 * 2**32 / copy_us * 1e6, matmul_flops=2 * 8192**3 / matmul_us * 1e6)


def _time_copy_us() -> float:
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(13)]
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize()
    return 1000 * statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events[2:]))


if __name__ == "__main__":
    print(json.dumps(asdict(measure_limits())))
