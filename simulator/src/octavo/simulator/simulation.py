"""One seed: a cluster, traffic and faults, and what must hold at the end."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.common.messages.generation import Submit
from octavo.simulator.scripted_gateway import ClientRequest, ClientState
from octavo.simulator.simulated_cluster import ClusterShape, SimulatedCluster
from octavo.simulator.tally import FAULTS
from octavo.simulator.traffic import KEEP_S, Traffic, draw_shape

MIN_STEPS = 300
MIN_REQUESTS = 20
MIN_FAULTS = 3
MAX_TURNS = 2_000
MAX_WAITING = 12
"""Sequences that wait; with more there is no new traffic, so that the end is near when enough was done."""
MAX_DELIVERIES = 200_000
ABSENCES_MS = (0, 0, 5, 50, 300)
LONG_ABSENCES_MS = (0, 5, 50, 300, 1000)
"""Of the KV manager, without whom decode goes on: long enough for credits to run dry and blocks to be recycled."""
_CHANNELS = ("worker computes", "to worker", "from worker", "to KV manager", "from KV manager")


@dataclass(frozen=True, slots=True)
class SeedReport:
    """What a seed that held did. `counts` is by the names of `tally.py`."""

    num_steps: int
    num_requests: int
    num_faults: int
    num_deliveries: int
    virtual_s: float
    counts: Counter[str]


def run_seed(seed: int, trace: Callable[[str], None] | None = None) -> SeedReport:
    """Raises AssertionError, or whatever a core raises, if the seed finds a fault."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-simulator-"))
    try:
        return Simulation(seed, folder, trace).run()
    finally:
        shutil.rmtree(folder)


class Simulation:
    """Turns of traffic, faults and deliveries until the seed has done enough; then all comes to its end."""

    def __init__(self, seed: int, folder: Path, trace: Callable[[str], None] | None = None) -> None:
        self._seed = seed
        self._dice = random.Random(seed)
        shape = self._draw_shape(folder)
        self.cluster = SimulatedCluster(shape, seed, trace)
        self._traffic = Traffic(self._dice, self.cluster.model.max_model_len, min(shape.max_num_seqs, 3))
        self._trace = trace
        self._num_requests = self._num_deliveries = 0
        self._faults: list[tuple[Callable[[], None], float]] = [
            (self._cut_worker_link, 4),
            (self._cut_kv_link, 4),
            (self._restart_kvmanager, 3),
            (self._lose_catalogue, 1),
            (self._restart_worker, 1),
            (self._restart_scheduler, 1),
            (self._lose_gateway, 1),
            (self._pause, 3),
            (self.cluster.corrupt_a_plan, 0.5),
            (self._bring_back_stale_scheduler, 1),
        ]
        self._fault_rate = self._dice.choice([0.1, 0.2, 0.3])

    def _draw_shape(self, folder: Path) -> ClusterShape:
        return draw_shape(self._dice, folder)

    def run(self) -> SeedReport:
        for _ in range(MAX_TURNS):
            if self._has_done_enough():
                break
            self._turn()
        assert self._has_done_enough(), f"too little after {MAX_TURNS} turns: {self._progress()}"
        self._note("the last request is in")
        self._deliver_all()
        self.cluster.pass_time(2 * max(KEEP_S))
        self._deliver_all()
        self.cluster.assert_idle()
        self.cluster.tally.scheduler(self.cluster.core.stats)
        num_steps, num_requests, num_faults = self._progress()
        counts = Counter(self.cluster.tally)
        return SeedReport(num_steps, num_requests, num_faults, self._num_deliveries, self.cluster.now, counts)

    def _deliver_all(self) -> None:
        while self.cluster.step():
            self._num_deliveries += 1
            assert self._num_deliveries < MAX_DELIVERIES, "no end after so many messages"

    def _progress(self) -> tuple[int, int, int]:
        tally = self.cluster.tally
        return self.cluster.num_steps, self._num_requests, sum(tally[name] for name in FAULTS)

    def _has_done_enough(self) -> bool:
        num_steps, num_requests, num_faults = self._progress()
        return num_steps >= MIN_STEPS and num_requests >= MIN_REQUESTS and num_faults >= MIN_FAULTS

    def _turn(self) -> None:
        dice = self._dice
        if self.cluster.core.num_waiting < MAX_WAITING:
            if dice.random() < 0.7:
                self._submit(self._traffic.draw())
            if dice.random() < 0.15:
                self._submit_branch()
            if dice.random() < 0.15:
                self._submit_turn()
        if dice.random() < 0.15:
            self._abort()
        if dice.random() < 0.05:
            self._forget()
        if dice.random() < self._fault_rate:
            fault = dice.choices([fault for fault, _ in self._faults], [weight for _, weight in self._faults])[0]
            self._note(f"fault: {getattr(fault, '__name__', fault)}")
            fault()
        for _ in range(dice.randrange(0, 120)):
            if not self.cluster.step():
                break
            self._num_deliveries += 1

    def _note(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.cluster.now:10.6f}  == {text}")

    def _submit(self, submit: Submit, shared: tuple[int, ...] = ()) -> None:
        self._num_requests += 1
        self.cluster.submit_over(self._dice.choice(self.cluster.gateways), submit, shared)

    def _submit_branch(self) -> None:
        """Of a request that lives or may be kept; or that was never kept, and is not to be found."""
        if (parent := self._any_request()) and (drawn := self._traffic.draw_branch(parent)):
            self._submit(*drawn)

    def _submit_turn(self) -> None:
        if (before := self._any_request()) and (drawn := self._traffic.draw_turn(before)):
            self.cluster.events["next turn"] += 1
            self._submit(drawn)

    def _abort(self) -> None:
        gateway = self._dice.choice(self.cluster.gateways)
        live = [request for request in gateway.requests.values() if request.state is ClientState.OPEN]
        if live:
            gateway.abort(self._dice.choice(live), self._dice.choice([None, 0, 1]))

    def _forget(self) -> None:
        if request := self._any_request():
            self.cluster.events["forgotten"] += 1
            self._dice.choice(self.cluster.gateways).forget(request)

    def _any_request(self) -> ClientRequest | None:
        requests = list(self._dice.choice(self.cluster.gateways).requests.values())
        return self._dice.choice(requests[-10:]) if requests else None

    def _resume(self, lost: list[ClientRequest]) -> None:
        """Their gateways live, and submit them again with what came of them."""
        for request in lost:
            if any(choice.end is None and not choice.is_aborted for choice in request.choices):
                self._num_requests += 1
                self.cluster.resume_over(self._dice.choice(self.cluster.gateways), request)

    def _submit_again(self, lost: list[ClientRequest]) -> None:
        """Some clients try once more."""
        for request in lost:
            if self._dice.random() < 0.7:
                self.cluster.events["submitted again"] += 1
                shared = request.start[: len(request.start) - len(request.submit.prompt_token_ids)]
                self._submit(request.submit, shared)

    # Faults.

    def _absence(self) -> int:
        return self._dice.choice(ABSENCES_MS)

    def _cut_worker_link(self) -> None:
        self.cluster.cut_worker_link(self._absence())

    def _cut_kv_link(self) -> None:
        self.cluster.cut_kv_link(self._dice.choice(LONG_ABSENCES_MS))

    def _restart_kvmanager(self) -> None:
        self.cluster.restart_kvmanager(self._dice.choice(LONG_ABSENCES_MS))

    def _lose_catalogue(self) -> None:
        self.cluster.lose_catalogue(self._dice.choice(LONG_ABSENCES_MS))

    def _restart_worker(self) -> None:
        self.cluster.restart_worker(self._absence())

    def _restart_scheduler(self) -> None:
        self._resume(self.cluster.restart_scheduler(self._absence()))

    def _lose_gateway(self) -> None:
        has_died = self._dice.random() < 0.5
        self.cluster.events["gateway died" if has_died else "gateway link cut"] += 1
        lost = self.cluster.lose_gateway(self._dice.choice(self.cluster.gateways))
        (self._submit_again if has_died else self._resume)(lost)

    def _pause(self) -> None:
        self.cluster.pause(self._dice.choice(_CHANNELS), self._dice.choice([0.05, 0.3]))

    def _bring_back_stale_scheduler(self) -> None:
        if not self.cluster.bring_back_stale_scheduler():
            self._restart_scheduler()
