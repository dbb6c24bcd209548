"""The settings of the scheduler's core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.scheduler.preemption import PreemptionSettings


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """See `SchedulerConfig` for the meaning of each."""

    max_num_batched_tokens: int | None = None
    max_num_waiting: int = 4096
    max_num_choices: int = 1024
    max_num_kept: int = 256
    pipeline_depth: int = 2
    prefix_cache: bool = True
    credits_per_sequence: int = 2
    reservation: Literal["pages", "slabs"] = "pages"
    preemption: PreemptionSettings = field(default_factory=PreemptionSettings)
    single_flight_timeout_s: float = 5.0
    min_shared_blocks: int = 4
    num_explained_requests: int = 10_000
