"""Limits of a step: as set, or by the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.worker.config import WorkerConfig
from octavo.worker.loading import default_sizes
from octavo.worker.step_sizes import ON_CPU, StepSizes, sizes_for_gpu, step_sizes


def config(**limits: int) -> WorkerConfig:
    return WorkerConfig(listen=["frames:///tmp/unused.sock"], model=Path(), **limits)


@pytest.mark.parametrize(
    ("limits", "used"),
    [
        ({}, ON_CPU),
        ({"max_num_batched_tokens": 16}, StepSizes(16, 16)),
        ({"max_num_batched_tokens": 4096}, StepSizes(32, 4096)),
        ({"max_num_seqs": 1000}, StepSizes(1000, 1000)),
        ({"max_num_seqs": 4}, StepSizes(4, 512)),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 4}, StepSizes(4, 4)),
    ],
)
def test_a_limit_that_is_left_out_follows_the_other(limits: dict[str, int], used: StepSizes) -> None:
    assert step_sizes(config(**limits), default_sizes(torch.device("cpu"))) == used


@pytest.mark.parametrize(
    ("gib", "sizes"),
    [(8, StepSizes(128, 2048)), (24, StepSizes(256, 4096)), (80, StepSizes(1024, 8192)), (141, StepSizes(1024, 8192))],
)
def test_a_larger_gpu_gets_larger_steps(gib: int, sizes: StepSizes) -> None:
    assert sizes_for_gpu(gib * 2**30) == sizes


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="at least max_num_seqs"):
        config(max_num_seqs=64, max_num_batched_tokens=16)
