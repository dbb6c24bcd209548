"""How many sequences and tokens a step may have, where the settings leave it to the device."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.worker.config import WorkerConfig

GIB = 2**30


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The most that one step may compute."""

    max_num_seqs: int
    max_num_batched_tokens: int


ON_CPU = StepSizes(32, 512)
ON_GPU = ((48 * GIB, StepSizes(1024, 8192)), (20 * GIB, StepSizes(256, 4096)), (0, StepSizes(128, 2048)))
"""(bytes of the GPU from which it is the default, sizes), the largest first."""


def sizes_for_gpu(total_memory: int) -> StepSizes:
    """By bytes of memory: larger steps need more for activations, and more sequences more blocks."""
    return next(sizes for at_least, sizes in ON_GPU if total_memory >= at_least)


def step_sizes(config: WorkerConfig, usual: StepSizes) -> StepSizes:
    """The settings; of those left out one follows the other, so that a step holds one token of each sequence."""
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is None:
        seqs = usual.max_num_seqs if tokens is None else min(usual.max_num_seqs, tokens)
    return StepSizes(seqs, max(usual.max_num_batched_tokens, seqs) if tokens is None else tokens)
