"""One step: apply the plan, run the model, sample. Synchronous; knows no link, clock or thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch

from octavo.common.messages.generation import PromptLogprobs, TokenLogprobs
from octavo.common.messages.step import OpenSlot, RowFlag, SlotRules, StepPlan, TableDelta
from octavo.common.messages.token_rules import TokenRules
from octavo.worker.attention import AttentionBackend
from octavo.worker.block_transfers import NO_TRANSFERS, BlockTransfers, FinishedTransfers
from octavo.worker.grammars import Grammars
from octavo.worker.input_batch import InputBatch, StepLimits
from octavo.worker.kv_cache import KvCache
from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.plan_check import check_plan
from octavo.worker.prompt_logprobs import prompt_logprobs, prompt_parts
from octavo.worker.sampler import sample
from octavo.worker.transfer_check import check_transfers, move_blocks

_WARM_RULES = SlotRules(
    TokenRules(bad_words=((0, 0),), min_tokens=1, logit_bias=((0, 0.0),), repetition_penalty=1.1, min_p=0.1),
    prompt_token_ids=(0,),
    output_token_ids=(),
    ending_token_ids=(0,),
)


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


class Runner(ABC):
    """Runs plans in order."""

    limits: StepLimits
    is_asynchronous = False
    """A launch returns before the step has ended."""

    @property
    @abstractmethod
    def num_open_slots(self) -> int:
        """Slots that hold a sequence."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory; 0 for a runner that makes no transfers."""
        return 0

    @abstractmethod
    def reset(self) -> None:
        """Close all slots; the contents of pool and host memory count as lost."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Begin one step. Raises ProtocolError, or a subclass, before anything has changed."""

    @abstractmethod
    def use_grammars(self, grammars: Grammars) -> None:
        """Follow grammars; without, slots that have one are refused."""

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


class ModelRunner(Runner):
    """The runner of any device; a launch returns when the step has ended. Owns the model, the pool and the slots."""

    def __init__(
        self,
        model: CausalLm,
        kv_cache: KvCache,
        attention: AttentionBackend,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.limits = StepLimits(
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=model.config.vocab_size,
        )
        self._kv_cache = kv_cache
        self._attention = attention
        self._batch = InputBatch(self.limits, model.device)

    def use_grammars(self, grammars: Grammars) -> None:
        """See Runner."""
        self._batch.grammars = grammars

    @property
    def num_open_slots(self) -> int:
        """See Runner."""
        return sum(opened is not None for opened in self._batch.slots)

    def reset(self) -> None:
        """See Runner."""
        self._kv_cache.transfers.finished(wait=True)
        self._batch.reset()

    @property
    def num_host_blocks(self) -> int:
        """See Runner."""
        return self._kv_cache.transfers.num_host_blocks

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See Runner."""
        return FinishedStep(self._run(plan))

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepSamples:
        check_plan(plan, self._batch)
        check_transfers(plan, self._batch.tables, self.num_host_blocks)
        self._batch.apply(plan)
        move_blocks(plan, self._kv_cache.transfers, self._batch.tables, self._kv_cache.copy_blocks)
        samples = self._compute(plan)
        # A plan without rows is there to wait for the copies.
        return replace(samples, transfers=self._kv_cache.transfers.finished(wait=not plan.slots))

    def _compute(self, plan: StepPlan) -> StepSamples:
        if not plan.slots:
            return StepSamples([], [])
        inputs = self._batch.inputs(plan)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, self._attention.prepare(inputs.attention))
        pending = prompt_logprobs(
            prompt_parts(plan, self._batch.slots),
            hidden,
            self.model.logits,
            lambda values: torch.tensor(values, device=hidden.device),
            lambda values: values,
        )
        told = [] if pending is None else pending.read()
        if not inputs.draws:
            return StepSamples([], [], prompt_logprobs=told)
        logits = self.model.logits(hidden.index_select(0, inputs.sampled_tokens))
        sampled = sample(logits, inputs.draws)
        self._batch.keep_sampled(inputs, sampled.first_of_draw)
        return StepSamples(sampled.token_ids.tolist(), sampled.logprobs, prompt_logprobs=told)
