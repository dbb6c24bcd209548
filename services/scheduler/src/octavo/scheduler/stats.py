"""Counts that the core keeps as it goes; `metrics.py` shows them to Prometheus at a scrape."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.scheduler.timeline import Timeline


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start. Times in seconds."""

    num_requests: int = 0
    num_resumed_requests: int = 0
    """Of them, those that came with output tokens, from another scheduler."""
    num_failed_requests: int = 0
    num_aborted_choices: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_wasted_rows: int = 0
    """Rows computed for sequences that had ended in the step before."""
    num_preemptions: int = 0
    num_paused: dict[str, int] = field(default_factory=lambda: {"no_slot": 0, "no_blocks": 0})
    """Preempted for more urgent ones, by what these lacked."""
    num_preemptions_by_kind: dict[str, int] = field(
        default_factory=lambda: {"recompute": 0, "swap": 0, "partial_swap": 0, "overdue": 0}
    )
    """What became of the victims. Overdue: recomputed after they had been swapped."""
    num_transferred_blocks: dict[str, int] = field(default_factory=lambda: {"to_host": 0, "to_device": 0})
    num_host_prompt_tokens: int = 0
    """Of the cached prompt tokens, those restored from host memory."""
    num_forks: int = 0
    """Sequences that began with the blocks of another one, which they share."""
    num_single_flight_waits: int = 0
    """Times that a sequence waited for another to compute its next block."""
    num_pool_losses: int = 0
    num_worker_resumes: int = 0
    num_kvmanager_resumes: int = 0
    num_declarations: int = 0
    """Times that a KV manager which knew nothing was told all."""
    num_recycled_blocks: int = 0
    worker_busy_s: float = 0.0
    worker_idle_s: float = 0.0
    """Time in which the worker had no plan to run, between the first step and the last."""
    stall_s: dict[str, float] = field(default_factory=lambda: {"credits": 0.0, "admission": 0.0, "swap": 0.0})
    """Time in which the pipeline had room and nothing could be launched because of the KV manager, by cause."""
    num_stalls: dict[str, int] = field(default_factory=lambda: {"credits": 0, "admission": 0, "swap": 0})
    timeline: Timeline = field(default_factory=Timeline)
    """The last of what is counted here, one by one."""
