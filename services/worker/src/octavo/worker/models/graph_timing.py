"""How long the GPU takes for some launches, as it will run them in a graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def graph_ms(launch: Callable[[], object], repeats: int = 7) -> float:
    """Median milliseconds of a replay. `launch` runs once before it is captured, so that all of it is compiled."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        launch()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    times: list[float] = []
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return float(statistics.median(times[2:]))
