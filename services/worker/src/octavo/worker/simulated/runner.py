"""Runs plans against a clock: checks and tables as on a device, results at the time when a device would have them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from octavo.common.messages.step import RowFlag, StepPlan
from octavo.worker.block_tables import BlockTables
from octavo.worker.plan_check import check_plan
from octavo.worker.runner import LaunchedStep, Runner, StepSamples
from octavo.worker.shared_runs import shared_runs
from octavo.worker.simulated.block_copies import BlockCopies
from octavo.worker.simulated.profile import Profile
from octavo.worker.simulated.sampling import Sampling, TokenArray
from octavo.worker.simulated.step_time import StepWork, step_seconds
from octavo.worker.slots import Slots, StepLimits
from octavo.worker.transfer_check import check_transfers, move_blocks


@dataclass(frozen=True, slots=True)
class Clock:
    """Time in seconds, and how to let it pass."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL_CLOCK = Clock()
SAMPLES = RowFlag.SAMPLE | RowFlag.FAN_OUT


@dataclass(frozen=True, slots=True)
class SimulatedStep(LaunchedStep):
    """A step with its times by the clock."""

    samples: StepSamples
    idle_s: float
    started: float
    end: float
    clock: Clock

    def wait(self) -> StepSamples:
        """See LaunchedStep."""
        if (left := self.end - self.clock.now()) > 0:
            self.clock.sleep(left)
        return self.samples

    @property
    def measured_s(self) -> tuple[float, float]:
        """See LaunchedStep."""
        return self.idle_s, self.end - self.started


class SimulatedRunner(Runner):
    """A step starts once it has arrived and the one before has ended, and takes what the profile says."""

    is_asynchronous = True

    def __init__(
        self,
        profile: Profile,
        limits: StepLimits,
        token_ids: TokenArray,
        *,
        num_host_blocks: int = 0,
        num_gpus: int = 1,
        clock: Clock = REAL_CLOCK,
    ) -> None:
        """`token_ids` are those that may be sampled; work is spread over `num_gpus`."""
        self.limits = limits
        self._profile = profile
        self._num_gpus = num_gpus
        self._num_host_blocks = num_host_blocks
        self._clock = clock
        self.slots = Slots(limits, BlockTables(limits.max_num_seqs, limits.max_blocks_per_seq, limits.num_blocks))
        self._sampling = Sampling(token_ids, limits.vocab_size, limits.max_num_seqs)
        block_bytes = limits.block_size * profile.model.kv_token_bytes
        self._copies = BlockCopies(block_bytes / profile.device.host_link_bytes_per_s / num_gpus)
        self._end_of_last = clock.now()

    @property
    def num_host_blocks(self) -> int:
        """See Runner."""
        return self._num_host_blocks

    def close_slots(self) -> None:
        """See Runner."""
        self.slots.close_all()
        self._copies.forget()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See Runner."""
        arrived = self._clock.now()
        slots, copies = self.slots, self._copies
        check_plan(plan, slots)
        check_transfers(plan, slots.tables, self._num_host_blocks)
        slots.apply_slots(plan)
        self._sampling.apply(plan)
        slots.tables.append_on_host(plan.table_deltas)
        copies.now = max(arrived, self._end_of_last)
        move_blocks(plan, copies, slots.tables, lambda copied: None)
        started = copies.compute_after
        end = started + step_seconds(self._profile, self._work(plan), self._num_gpus)
        if not plan.slots:  # there to wait for the copies
            end = max(end, copies.end_of_all)
        samples = replace(self._sampling.draw(plan, slots.slots), transfers=copies.finished(by=end))
        for slot, flags in zip(plan.slots, plan.flags, strict=True):
            if flags & SAMPLES:
                slots.has_sampled[slot] = True
        step = SimulatedStep(samples, max(0.0, started - self._end_of_last), started, end, self._clock)
        self._end_of_last = end
        return step

    def _work(self, plan: StepPlan) -> StepWork:
        lengths, starts = np.array(plan.lengths, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
        ends = starts + lengths
        is_decode = lengths == 1
        decode_context = int(ends[is_decode].sum())
        if plan.groups:
            decode_context -= self._num_shared(plan)
        lengths, starts, ends = lengths[~is_decode], starts[~is_decode], ends[~is_decode]
        return StepWork(
            num_tokens=len(plan.lengths) - len(lengths) + int(lengths.sum()),
            num_logits=sum(1 for flags in plan.flags if flags & SAMPLES),
            decode_context=decode_context,
            prefill_context=int(ends.sum()),
            prefill_pairs=int((lengths * starts + lengths * (lengths + 1) // 2).sum()),
            num_copied_blocks=len(plan.copies),
            block_size=self.limits.block_size,
        )

    def _num_shared(self, plan: StepPlan) -> int:
        """Tokens of shared prefixes that rows need not read again: each GPU reads them once."""
        runs = shared_runs(plan, self.slots.tables, self.limits.block_size)
        return sum(
            (len(run.rows) - min(len(run.rows), self._num_gpus)) * run.num_blocks * self.limits.block_size
            for run in runs
        )
