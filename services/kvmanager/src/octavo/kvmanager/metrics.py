"""The KV manager's metrics, read from its pools when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from octavo.kvmanager.server import KvManagerServer

_STATES = ("free", "granted", "active", "cached", "quarantined", "transferring")
_HOST_STATES = ("free", "swapped", "cached")


class KvMetrics(Collector):
    """A collector for a Prometheus registry. Costs nothing on the step path."""

    def __init__(self, server: KvManagerServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("octavo_kv_blocks", "Blocks by state.", labels=["pool", "state"])
        host_blocks = GaugeMetricFamily(
            "octavo_kv_host_blocks", "Blocks of host memory by state.", labels=["pool", "state"]
        )
        for pool in self._server.pools:
            counts = pool.counts()
            for state in _STATES:
                blocks.add_metric([pool.pool_id, state], getattr(counts, state))
            for state in _HOST_STATES:
                host_blocks.add_metric([pool.pool_id, state], getattr(counts, f"host_{state}"))
        yield blocks
        yield host_blocks
        stats = self._server.stats
        yield CounterMetricFamily(
            "octavo_prefix_lookup_tokens", "Tokens of admitted sequences.", stats.num_prefix_lookup_tokens
        )
        yield CounterMetricFamily(
            "octavo_prefix_hit_tokens", "Those of them found in the prefix cache.", stats.num_prefix_hit_tokens
        )
        missed = CounterMetricFamily(
            "octavo_prefix_missed_blocks", "Full blocks of admitted sequences not found, by reason.", labels=["reason"]
        )
        for reason, count in stats.num_missed_blocks.items():
            missed.add_metric([reason.name.lower()], count)
        yield missed
        waits = CounterMetricFamily("octavo_admission_waits", "Admissions told to ask again.", labels=["reason"])
        for wait, count in stats.num_waits.items():
            waits.add_metric([wait.name.lower()], count)
        yield waits
        for name, text, total in (
            ("octavo_prefix_lookup_blocks", "Full blocks of admitted sequences.", stats.num_prefix_lookup_blocks),
            ("octavo_prefix_hit_blocks", "Those of them found.", stats.num_prefix_hit_blocks),
            ("octavo_flushed_blocks", "Blocks that a flush made unfindable.", stats.num_flushed_blocks),
            ("octavo_evictions", "Cached blocks taken for new content.", stats.num_evictions),
        ):
            yield CounterMetricFamily(name, text, value=total)
        yield CounterMetricFamily(
            "octavo_host_hit_tokens", "Hit tokens that were restored from host memory.", stats.num_host_hit_tokens
        )
        moved = CounterMetricFamily("octavo_kv_moved_blocks", "Blocks copied from or to host memory.", labels=["kind"])
        moved.add_metric(["swap_out"], stats.num_swapped_out_blocks)
        moved.add_metric(["swap_in"], stats.num_swapped_in_blocks)
        moved.add_metric(["sink"], stats.num_sunk_blocks)
        yield moved
        admissions = CounterMetricFamily("octavo_admissions", "Answers to admissions.", labels=["verdict"])
        for verdict, count in stats.num_admissions.items():
            admissions.add_metric([verdict.name.lower()], count)
        yield admissions
