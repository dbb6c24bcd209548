"""Counters only grow, whatever happens to requests: preemption, swap, larger hits later, aborts, deaths of services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.kvmanager.metrics import KvMetrics
from octavo.scheduler.metrics import SchedulerCollector
from octavo.simulator.seeds import silence_logs
from octavo.simulator.simulation import Simulation


@pytest.fixture(autouse=True)
def silent_logs() -> Iterator[None]:
    silence_logs()
    yield
    structlog.reset_defaults()


class _Scraped(Simulation):
    """Scrapes scheduler and KV manager after every turn, as Prometheus does."""

    num_scrapes = 0

    def _turn(self) -> None:
        super()._turn()
        for owner, collector in (
            (self.cluster.core, SchedulerCollector(self.cluster.core)),
            (self.cluster.kvmanager, KvMetrics(self.cluster.kvmanager)),
        ):
            self._scrape(owner, collector)

    def _scrape(self, owner: object, collector: SchedulerCollector | KvMetrics) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        families = text_string_to_metric_families(generate_latest(registry).decode())
        counters = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }
        known = vars(self).setdefault("known", {})
        before = known.get(type(owner), (None, {}))
        if before[0] is owner:  # else it is a new process, whose counters begin at 0
            fallen = {name: (value, counters.get(name)) for name, value in before[1].items() if counters[name] < value}
            assert fallen == {}
        assert all(value >= 0 for value in counters.values())
        known[type(owner)] = (owner, counters)
        self.num_scrapes += 1


@pytest.mark.parametrize("seed", range(1, 7))
def test_no_counter_falls_and_every_scrape_parses(seed: int, tmp_path: Path) -> None:
    simulation = _Scraped(seed, tmp_path)
    simulation.run()
    assert simulation.num_scrapes > 20
