"""The requests of a benchmark: arrival, prompt, output length. The same seed makes the same load."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

LengthSpread = Literal["fixed", "lognormal"]

_SIGMA = 0.8
"""Spread of a lognormal length: 10 % are below 0.26 of the mean, 10 % above 2.02."""
_LONGEST = 8
"""A lognormal length is cut at so many times the mean."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    due_s: float | None
    """Seconds from the start at which it arrives; None: as soon as there is room."""
    prompt_ids: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    num_requests: int
    rate: float | None
    """Mean arrivals per second."""
    input_len: int
    output_len: int
    lengths: LengthSpread
    shared_prefix: int
    """Tokens that begin every prompt, on top of `input_len`."""
    max_token_id: int
    seed: int


def make_workload(shape: WorkloadShape) -> list[BenchRequest]:
    """Requests in the order of their arrival. Gaps between arrivals are exponential: a Poisson process."""
    draw = random.Random(shape.seed)
    prefix = _ids(draw, shape.shared_prefix, shape)
    requests = []
    due_s = 0.0
    for _ in range(shape.num_requests):
        prompt_ids = prefix + _ids(draw, _length(draw, shape.input_len, shape), shape)
        output_len = _length(draw, shape.output_len, shape)
        requests.append(BenchRequest(None if shape.rate is None else due_s, prompt_ids, output_len))
        if shape.rate is not None:
            due_s += draw.expovariate(shape.rate)
    return requests


def _ids(draw: random.Random, count: int, shape: WorkloadShape) -> list[int]:
    return [draw.randint(0, shape.max_token_id) for _ in range(count)]


def _length(draw: random.Random, mean: int, shape: WorkloadShape) -> int:
    if shape.lengths == "fixed":
        return mean
    drawn = draw.lognormvariate(math.log(mean) - _SIGMA**2 / 2, _SIGMA)
    return max(1, min(round(drawn), _LONGEST * mean))
