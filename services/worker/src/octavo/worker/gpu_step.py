"""A launched step of a GPU: its results travel to pinned memory, and events tell when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.common.messages.generation import TokenLogprobs
from octavo.worker.block_transfers import BlockTransfers
from octavo.worker.prompt_logprobs import PendingPromptLogprobs
from octavo.worker.runner import LaunchedStep, StepSamples


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of the draws that ask for them, in pinned memory."""

    counts: list[int | None]  # for each draw of the step: how many of the best it asks for
    chosen: Tensor  # float32 [num_asking]
    best_ids: Tensor  # int64 [num_asking, max_count]
    best: Tensor  # float32 [num_asking, max_count]

    def read(self, token_ids: Sequence[int]) -> list[TokenLogprobs | None]:
        """Once the step has ended; `token_ids` are those of all draws."""
        chosen, best_ids, best = self.chosen.tolist(), self.best_ids.tolist(), self.best.tolist()
        found: list[TokenLogprobs | None] = []
        asking = 0
        for token_id, count in zip(token_ids, self.counts, strict=True):
            if count is None:
                found.append(None)
                continue
            is_known = token_id >= 0
            logprobs = TokenLogprobs(chosen[asking], tuple(best_ids[asking][:count]), tuple(best[asking][:count]))
            found.append(logprobs if is_known else None)
            asking += 1
        return found


@dataclass(slots=True)
class GpuStep(LaunchedStep):
    """Events and results of one step."""

    began: torch.cuda.Event
    ended: torch.cuda.Event
    last_ended: torch.cuda.Event | None
    token_ids: Tensor  # int32, pinned
    rows: list[int] | None
    """Places of `token_ids` that are the step's samples; None for all."""
    logprobs: PendingLogprobs | None
    prompt: PendingPromptLogprobs | None = None

    def wait(self) -> StepSamples:
        """See LaunchedStep."""
        self.ended.synchronize()
        token_ids: list[int] = self.token_ids.tolist()
        if self.rows is not None:
            token_ids = [token_ids[row] for row in self.rows]
        return StepSamples(
            token_ids,
            [] if self.logprobs is None else self.logprobs.read(token_ids),
            prompt_logprobs=[] if self.prompt is None else self.prompt.read(),
        )

    @property
    def measured_s(self) -> tuple[float, float]:
        """See LaunchedStep."""
        idle_ms = 0.0 if self.last_ended is None else self.last_ended.elapsed_time(self.began)
        return max(idle_ms, 0.0) * 1e-3, self.began.elapsed_time(self.ended) * 1e-3


class StepResults:
    """Owns the sampled tokens on the device. A step begins and ends in the order of the stream."""

    def __init__(self, max_draws: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(max_draws, dtype=torch.int32, device=device)
        self._began: torch.cuda.Event | None = None
        self._last_ended: torch.cuda.Event | None = None

    def begin(self) -> None:
        """What is launched from now on is the step's."""
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._began.record()

    def end(
        self,
        num_draws: int,
        logprobs: PendingLogprobs | None,
        rows: list[int] | None = None,
        prompt: PendingPromptLogprobs | None = None,
    ) -> GpuStep:
        """The step is launched; its first `num_draws` tokens go to the host."""
        assert self._began is not None
        token_ids = torch.empty(num_draws, dtype=torch.int32, pin_memory=num_draws > 0)
        token_ids.copy_(self.token_ids[:num_draws], non_blocking=True)
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record()
        step = GpuStep(self._began, ended, self._last_ended, token_ids, rows, logprobs, prompt)
        self._last_ended = ended
        return step


@dataclass(frozen=True, slots=True)
class StepWithTransfers(LaunchedStep):
    """A step, and the transfers that have ended with it."""

    step: LaunchedStep
    transfers: BlockTransfers
    waits: bool
    """For all that have begun."""

    def wait(self) -> StepSamples:
        """See LaunchedStep."""
        return replace(self.step.wait(), transfers=self.transfers.finished(wait=self.waits))

    @property
    def measured_s(self) -> tuple[float, float]:
        """See LaunchedStep."""
        return self.step.measured_s
