"""One step: apply the plan, run the model, sample. Synchronous; knows no link, clock or thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch

from octavo.common.messages.generation import TokenLogprobs
from octavo.common.messages.kv import TransferDirection
from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from octavo.worker.attention import AttentionBackend
from octavo.worker.block_transfers import NO_TRANSFERS, FinishedTransfers
from octavo.worker.input_batch import InputBatch, StepLimits
from octavo.worker.kv_cache import KvCache
from octavo.worker.models.decoder import Decoder
from octavo.worker.plan_check import check_plan
from octavo.worker.sampler import sample
from octavo.worker.transfer_check import check_transfers


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step sampled, in the order of StepResult."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    transfers: FinishedTransfers = NO_TRANSFERS
    """Copies that have ended since the last step."""


class ModelRunner:
    """Owns the model, the pool and the slots."""

    def __init__(
        self,
        model: Decoder,
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

    @property
    def num_open_slots(self) -> int:
        return sum(opened is not None for opened in self._batch.slots)

    def reset(self) -> None:
        """Close all slots; the contents of pool and host memory count as lost."""
        self._kv_cache.transfers.finished(wait=True)
        self._batch.reset()

    @property
    def num_host_blocks(self) -> int:
        return self._kv_cache.transfers.num_host_blocks

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepSamples:
        """Run one step. Raises ProtocolError, or a subclass, before anything has changed."""
        check_plan(plan, self._batch)
        check_transfers(plan, self._batch.tables, self._kv_cache.transfers.num_host_blocks)
        self._batch.apply(plan)
        self._move_blocks(plan)
        samples = self._compute(plan)
        # A plan without rows is there to wait for the copies.
        return replace(samples, transfers=self._kv_cache.transfers.finished(wait=not plan.slots))

    def _move_blocks(self, plan: StepPlan) -> None:
        transfers = self._kv_cache.transfers
        to_device = [one for one in plan.transfers if one.direction is TransferDirection.TO_DEVICE]
        transfers.to_host([one for one in plan.transfers if one.direction is TransferDirection.TO_HOST])
        copied_ids = [copy.target_id for copy in plan.copies]
        transfers.before_compute(chain(copied_ids, *(delta.block_ids for delta in plan.table_deltas)))
        self._kv_cache.copy_blocks(plan.copies)
        transfers.to_device(to_device)
        for transfer in to_device:
            for block_id, generation in zip(transfer.device_ids, transfer.generations, strict=True):
                self._batch.tables.renew(block_id, generation)

    def _compute(self, plan: StepPlan) -> StepSamples:
        if not plan.slots:
            return StepSamples([], [])
        inputs = self._batch.inputs(plan)
        hidden = self.model.forward(inputs.token_ids, inputs.positions, self._attention.prepare(inputs.attention))
        if not inputs.draws:
            return StepSamples([], [])
        logits = self.model.logits(hidden.index_select(0, inputs.sampled_tokens))
        sampled = sample(logits, inputs.draws)
        self._batch.keep_sampled(inputs, sampled.first_of_draw)
        return StepSamples(sampled.token_ids.tolist(), sampled.logprobs)

    def warm_up(self) -> None:
        """Run a prefill chunk and a decode, so that nothing runs for the first time in a served step. Then reset."""
        limits = self.limits
        num_tokens = max(1, min(limits.block_size, limits.max_num_batched_tokens, limits.max_model_len - 1))
        blocks = range(min(limits.num_blocks, num_tokens // limits.block_size + 1))
        self.execute(
            StepPlan(
                step_id=1,
                opened_slots=[OpenSlot(0, 0, (0,), 1.0, 0.9, 0, 1)],
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
