"""The scheduler's metrics, read from the core at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.scheduler.core import SchedulerCore


class SchedulerCollector(Collector):
    """Costs nothing between scrapes."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        core, stats = self._core, self._core.stats
        queues = GaugeMetricFamily("octavo_queue_sequences", "Sequences by queue.", labels=["queue"])
        queues.add_metric(["waiting"], core.num_waiting)
        queues.add_metric(["parked"], core.num_parked)
        queues.add_metric(["running"], core.num_running)
        queues.add_metric(["swapped"], core.num_swapped)
        yield queues
        blocks = GaugeMetricFamily("octavo_scheduler_kv_blocks", "KV blocks by state, last reply.", labels=["state"])
        if core.account is not None:
            counts = core.account.counts
            for state in ("free", "granted", "active", "cached", "quarantined", "transferring"):
                blocks.add_metric([state], getattr(counts, state))
        yield blocks
        for name, text, total in (
            ("octavo_scheduler_requests", "Requests received.", stats.num_requests),
            ("octavo_scheduler_resumed_requests", "Of these, begun by another one.", stats.num_resumed_requests),
            ("octavo_scheduler_failed_requests", "Requests ended in an error.", stats.num_failed_requests),
            ("octavo_scheduler_aborted_choices", "Choices ended by their gateway.", stats.num_aborted_choices),
            ("octavo_steps", "Steps whose result was accepted.", stats.num_steps),
            ("octavo_scheduler_prompt_tokens", "Prompt tokens of accepted requests.", stats.num_prompt_tokens),
            ("octavo_scheduler_cached_prompt_tokens", "Of these, found in the cache.", stats.num_cached_prompt_tokens),
            ("octavo_scheduler_output_tokens", "Tokens sampled and sent on.", stats.num_output_tokens),
            ("octavo_wasted_rows", "Rows computed for sequences that had ended.", stats.num_wasted_rows),
            ("octavo_scheduler_host_prompt_tokens", "Of these, restored from the host.", stats.num_host_prompt_tokens),
            ("octavo_forks", "Sequences that began with another's blocks.", stats.num_forks),
            ("octavo_single_flight_waits", "Waits for another's prefix blocks.", stats.num_single_flight_waits),
            ("octavo_pool_losses", "Times that worker or KV manager was lost.", stats.num_pool_losses),
            ("octavo_worker_resumes", "Links to the worker that went on.", stats.num_worker_resumes),
            ("octavo_kvmanager_resumes", "Links to the KV manager that went on.", stats.num_kvmanager_resumes),
            ("octavo_pool_declarations", "Times that a new KV manager was told of the pool.", stats.num_declarations),
            ("octavo_recycled_blocks", "Blocks used again while no KV manager was there.", stats.num_recycled_blocks),
            ("octavo_worker_busy_seconds", "Time that the worker computed.", stats.worker_busy_s),
            ("octavo_worker_starved_seconds", "Time that the worker had no plan.", stats.worker_idle_s),
        ):
            yield CounterMetricFamily(name, text, value=total)
        copying = GaugeMetricFamily("octavo_block_copy_seconds", "To copy a KV block between device and host.")
        computing = GaugeMetricFamily("octavo_block_compute_seconds", "To compute a KV block of a prompt.")
        if core.cost is not None and core.cost.knows_link:
            copying.add_metric([], core.cost.copy_s)
        if core.cost is not None and core.cost.knows_prefill:
            computing.add_metric([], core.cost.compute_s)
        yield copying
        yield computing
        preemptions = CounterMetricFamily(
            "octavo_preemptions", "Sequences whose blocks were taken away, by what became of them.", labels=["kind"]
        )
        for kind, count in stats.num_preemptions_by_kind.items():
            preemptions.add_metric([kind], count)
        yield preemptions
        moved = CounterMetricFamily(
            "octavo_transferred_blocks", "KV blocks copied between device and host.", labels=["direction"]
        )
        for direction, count in stats.num_transferred_blocks.items():
            moved.add_metric([direction], count)
        yield moved
        stalls = CounterMetricFamily("octavo_stalls", "Stalls of the step pipeline by cause.", labels=["cause"])
        stalled = CounterMetricFamily("octavo_stall_seconds", "Time stalled by cause.", labels=["cause"])
        for cause, count in stats.num_stalls.items():
            stalls.add_metric([cause], count)
            stalled.add_metric([cause], stats.stall_s[cause])
        yield stalls
        yield stalled
        waited = CounterMetricFamily(
            "octavo_request_wait_seconds", "Time that sequences did not run, counted when it is over.", labels=["cause"]
        )
        for wait_cause, seconds in core.log.wait_s.items():
            waited.add_metric([wait_cause], seconds)
        yield waited
        yield CounterMetricFamily(
            "octavo_preempted_tokens_computed_again",
            "Tokens that preempted sequences computed twice.",
            core.log.num_tokens_again,
        )
        cost = CounterMetricFamily(
            "octavo_preemption_cost_seconds",
            "Time to copy or to compute again what preemption took, by the rates measured; counted when it is back.",
            labels=["kind"],
        )
        for kind, seconds in core.log.preemption_cost_s.items():
            cost.add_metric([kind], seconds)
        yield cost
        blocks_found = CounterMetricFamily(
            "octavo_prefix_blocks", "Blocks of admitted sequences by what the cache had of them.", labels=["outcome"]
        )
        for outcome, count in core.log.prefix_blocks.items():
            blocks_found.add_metric([outcome], count)
        yield blocks_found
