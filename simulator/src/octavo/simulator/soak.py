"""One cluster for long: mixed load with aborts and faults in virtual time, and what is left of it now and then."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from octavo.simulator.simulated_cluster import ClusterShape
from octavo.simulator.simulation import Simulation
from octavo.simulator.traffic import KEEP_S, draw_shape

NUM_EXPLAINED_REQUESTS = 100
"""Records of ended requests that the scheduler keeps; the bound is reached in the first part."""
NUM_PARTS = 12


@dataclass(frozen=True, slots=True)
class SoakPart:
    """The state at the end of a part, when all requests have ended. Numbers are since the beginning."""

    virtual_s: float
    num_steps: int
    num_requests: int
    num_faults: int
    num_objects: int
    """Objects that the collector of cycles knows."""


def run_soak(seed: int, virtual_s: float) -> Iterator[SoakPart]:
    """Runs for so many seconds of virtual time, in parts. At the end of each nothing may be left: no sequence, no held
    block, no violation of the ledger, no request without its end, no wrong token.

    Raises AssertionError, or whatever a core raises, if that is not so.
    """
    with _folder() as folder:
        soak = _Soak(seed, folder)
        for part in range(1, NUM_PARTS + 1):
            yield soak.run_until(virtual_s * part / NUM_PARTS)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="octavo-soak-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class _Soak(Simulation):
    def _draw_shape(self, folder: Path) -> ClusterShape:
        shape = draw_shape(Random(self._seed), folder)
        return replace(shape, core=replace(shape.core, num_explained_requests=NUM_EXPLAINED_REQUESTS))

    def run_until(self, virtual_s: float) -> SoakPart:
        while self.cluster.now < virtual_s:
            self._turn()
        self._num_deliveries = 0  # the limit is for what is left
        self._deliver_all()
        self.cluster.pass_time(2 * max(KEEP_S))
        self._deliver_all()
        self.cluster.assert_idle()
        self.cluster.forget_ended_requests()
        gc.unfreeze()  # a KV manager that opens a pool freezes what is there, and what is frozen is not counted
        gc.collect()
        num_steps, num_requests, num_faults = self._progress()
        return SoakPart(self.cluster.now, num_steps, num_requests, num_faults, len(gc.get_objects()))
