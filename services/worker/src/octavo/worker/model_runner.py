"""One step: apply the plan, run the model, sample. Synchronous; knows no link, clock or thread."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.common.messages.step import StepPlan
from octavo.worker.attention import AttentionBackend
from octavo.worker.grammars import Grammars
from octavo.worker.input_batch import InputBatch
from octavo.worker.kv_cache import KvCache
from octavo.worker.models.causal_lm import CausalLm
from octavo.worker.plan_check import check_plan
from octavo.worker.prompt_logprobs import prompt_logprobs
from octavo.worker.prompt_parts import prompt_parts
from octavo.worker.runner import FinishedStep, LaunchedStep, Runner, StepSamples
from octavo.worker.sampler import sample
from octavo.worker.slots import StepLimits
from octavo.worker.transfer_check import check_transfers, move_blocks


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
        self._batch = self.slots = InputBatch(self.limits, model.device)

    def use_grammars(self, grammars: Grammars) -> None:
        """Follow grammars; without, slots that have one are refused."""
        self._batch.grammars = grammars

    def close_slots(self) -> None:
        """See Runner."""
        self._kv_cache.transfers.finished(wait=True)
        self._batch.close_all()

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
