"""Decides who gives way when the pool has no block left, and how much of its blocks leaves the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from octavo.common.messages.kv import PoolCounts
from octavo.scheduler.policy import choose_less_urgent, choose_victim
from octavo.scheduler.preemption_cost import PreemptionCost
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.swapping import Swapping

PreemptionMode = Literal["auto", "recompute", "swap"]


@dataclass(frozen=True, slots=True)
class PreemptionSettings:
    """See `SchedulerConfig` for the meaning of each."""

    mode: PreemptionMode = "auto"
    min_progress: int = 16
    swap_timeout_s: float = 60.0


class Preemption:
    """Chooses victims, and between recompute, a whole swap and the swap of a tail.

    A tail alone is swapped only while no other sequence is swapped, and when more is needed the rest of it goes before
    anybody else: so only one sequence holds blocks on the device without running.
    """

    def __init__(self, settings: PreemptionSettings, block_size: int, swapping: Swapping) -> None:
        self.cost = PreemptionCost(block_size)
        self._settings = settings
        self._swapping = swapping

    @property
    def skips_host_prefixes(self) -> bool:
        """Prefix blocks in host memory are to be computed again. With `swap`, host memory is used whatever it costs."""
        return self._settings.mode != "swap" and self.cost.host_is_slower

    def victim(self, running: Iterable[Sequence]) -> Sequence | None:
        return choose_victim(running, self._settings.min_progress)

    def less_urgent(self, running: Iterable[Sequence], first: Sequence, num_blocks: int) -> Sequence | None:
        """The one that makes way for the first in line, which lacks a slot or so many blocks."""
        return choose_less_urgent(running, first, self._settings.min_progress, num_blocks)

    def num_kept_blocks(self, victim: Sequence, num_needed: int, counts: PoolCounts) -> int | None:
        """Blocks that stay on the device when the victim is swapped, if `num_needed` are wanted; None to recompute it.

        Beams are recomputed: their search forks them at any time. Before the link has been measured, swapping is
        tried. What the worker has not been told of since the sequence came to run holds nothing worth saving, and a
        copy that it needs may be still to come.
        """
        num_blocks = len(victim.block_table)
        num_moved = num_blocks if self._swapping.num_swapped else min(num_blocks, num_needed)
        if (
            self._settings.mode == "recompute"
            or not victim.is_open
            or victim.request.beams is not None
            or num_moved > counts.host_free + counts.host_cached
            or (
                self._settings.mode == "auto"
                and self.cost.knows_link
                and self.cost.of_swap(num_moved) >= self.cost.of_recompute(victim.num_computed_tokens)
            )
        ):
            return None
        return num_blocks - num_moved

    def overdue(self, now: float) -> list[Sequence]:
        """Swapped sequences whose wait has become too long."""
        return self._swapping.overdue(now - self._settings.swap_timeout_s)
