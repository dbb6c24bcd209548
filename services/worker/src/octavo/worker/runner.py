"""What runs plans: the interface between the protocol and a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from octavo.common.messages.generation import PromptLogprobs, TokenLogprobs
from octavo.common.messages.step import OpenSlot, RowFlag, SlotRules, StepPlan, TableDelta
from octavo.common.messages.token_rules import TokenRules
from octavo.worker.slots import Slots, StepLimits

_WARM_RULES = SlotRules(
    TokenRules(bad_words=((0, 0),), min_tokens=1, logit_bias=((0, 0.0),), repetition_penalty=1.1, min_p=0.1),
    prompt_token_ids=(0,),
    output_token_ids=(),
    ending_token_ids=(0,),
)


@dataclass(frozen=True, slots=True)
class FinishedTransfers:
    """Transfers that have ended since the last look."""

    transfer_ids: list[int]
    copy_us: int
    """Time that their copies took."""


NO_TRANSFERS = FinishedTransfers([], 0)


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step sampled, in the order of StepResult."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    transfers: FinishedTransfers = NO_TRANSFERS
    """Copies that have ended since the last step."""
    prompt_logprobs: list[tuple[int, PromptLogprobs]] = field(default_factory=list)


class LaunchedStep(ABC):
    """A step on its way."""

    @abstractmethod
    def wait(self) -> StepSamples:
        """Block until the step has ended. Any thread may wait, once for each step, in the order of launches."""

    @property
    @abstractmethod
    def measured_s(self) -> tuple[float, float]:
        """Seconds that the device was idle before the step and busy with it, by its own clock. After `wait`."""


@dataclass(frozen=True, slots=True)
class FinishedStep(LaunchedStep):
    """A step that ended when its launch returned."""

    samples: StepSamples

    def wait(self) -> StepSamples:
        """See LaunchedStep."""
        return self.samples

    @property
    def measured_s(self) -> tuple[float, float]:
        """Nothing is known: whoever launched the step has waited for it."""
        return 0.0, 0.0


class Runner(ABC):
    """Runs plans in order."""

    limits: StepLimits
    slots: Slots
    is_asynchronous = False
    """A launch returns before the step has ended."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory; 0 for a runner that makes no transfers."""
        return 0

    @abstractmethod
    def close_slots(self) -> None:
        """Close all slots, when every copy has ended. What pool and host memory hold stays."""

    def reset(self) -> None:
        """Close all slots; the contents of pool and host memory count as lost."""
        self.close_slots()
        self.slots.tables.forget_generations()

    @abstractmethod
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin one step. Raises ProtocolError, or a subclass, before anything has changed."""

    def execute(self, plan: StepPlan) -> StepSamples:
        """Launch one step and wait for it."""
        return self.launch(plan).wait()

    def warm_up(self) -> None:
        """Run a prefill chunk and a decode, so that nothing runs for the first time in a served step. Then reset."""
        limits = self.limits
        num_tokens = max(1, min(limits.block_size, limits.max_num_batched_tokens, limits.max_model_len - 1))
        blocks = range(min(limits.num_blocks, num_tokens // limits.block_size + 1))
        self.execute(
            StepPlan(
                step_id=1,
                opened_slots=[OpenSlot(0, 0, (0,), 1.0, 0.9, 0, 1, _WARM_RULES)],
                table_deltas=[TableDelta(0, 0, tuple(blocks), (0,) * len(blocks))],
                slots=[0],
                starts=[0],
                lengths=[num_tokens],
                flags=[RowFlag.SAMPLE],
                token_ids=[0] * num_tokens,
            )
        )
        if num_tokens < min(len(blocks) * limits.block_size, limits.max_model_len):
            self.execute(
                StepPlan(
                    step_id=2,
                    slots=[0],
                    starts=[num_tokens],
                    lengths=[1],
                    flags=[RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE],
                )
            )
        self.reset()
