"""Random numbers by counter: each depends on (seed, position) only, not on batch, preemption or crash."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

UInt64Array = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Float64Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def uniforms(seeds: Sequence[int] | UInt64Array, positions: int | UInt64Array) -> Float64Array:
    """One number in [0, 1) for each seed (uint64) at a position of its sequence, one for all or one for each."""
    streams = _mix(np.array(seeds, dtype=np.uint64))
    bits = _mix(streams + _GOLDEN * (np.atleast_1d(np.asarray(positions, dtype=np.uint64)) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: UInt64Array) -> UInt64Array:
    """The finalizer of splitmix64: every input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64Array = x ^ (x >> np.uint64(31))
    return mixed
