"""Simulated workers whose clock the test holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.worker.simulated.profile import Profile
from octavo.worker.simulated.runner import Clock, SimulatedRunner
from octavo.worker.slots import StepLimits

H200 = "h200-llama-8b"


@dataclass
class ManualClock:
    """Time passes by `sleep` only."""

    time: float = 0.0

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.time, self.sleep)


def simulated_runner(
    clock: ManualClock | None = None, *, num_host_blocks: int = 0, num_gpus: int = 1, **limits: int
) -> SimulatedRunner:
    """A runner of the H200 profile. What is not given is small."""
    sizes = {
        "num_blocks": 96,
        "block_size": 16,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "max_model_len": 256,
        "vocab_size": 512,
        **limits,
    }
    return SimulatedRunner(
        Profile.load(H200),
        StepLimits(**sizes),
        np.arange(3, sizes["vocab_size"]),
        num_host_blocks=num_host_blocks,
        num_gpus=num_gpus,
        clock=(clock or ManualClock()).clock,
    )
