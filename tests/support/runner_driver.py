"""Drives a model runner as a scheduler would, one step at a time, with block ids scattered over the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.common.messages.step import OpenSlot, RowFlag, StepPlan, TableDelta
from octavo.worker.attention_torch import TorchAttention
from octavo.worker.kv_cache import KvCache
from octavo.worker.kv_scales import calibrate
from octavo.worker.model_runner import ModelRunner
from octavo.worker.models.model_folder import open_model
from octavo.worker.runner import StepSamples

BLOCK_SIZE = 16
NUM_BLOCKS = 96
CPU = torch.device("cpu")

SAMPLE, FAN_OUT, FED = RowFlag.SAMPLE, RowFlag.FAN_OUT, RowFlag.FED_BY_LAST_SAMPLE


class RecordingModel:
    """A decoder that keeps the logits it gave last."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.last_logits = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        self.last_logits = self._model.logits(hidden)
        return self.last_logits


def make_runner(
    folder: Path,
    num_blocks: int = NUM_BLOCKS,
    num_host_blocks: int = 0,
    fp8_kv: bool = False,
    quantize: bool = False,
    **limits: int,
) -> ModelRunner:
    """A runner over a pool that is filled with NaN, as unused memory may be."""
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 256, **limits}
    opened = open_model(folder, sizes["max_model_len"])
    model = opened.load(torch.float32, CPU, lambda share: None, quantize=quantize)
    kv_dtype = torch.float8_e4m3fn if fp8_kv else torch.float32
    scales = calibrate(model) if fp8_kv else None
    kv_cache = KvCache(model.config, num_blocks, BLOCK_SIZE, kv_dtype, CPU, num_host_blocks, scales)
    kv_cache.pool.fill_(torch.nan)
    attention = TorchAttention(kv_cache.pool, model.config.num_heads, model.config.attention, scales)
    return ModelRunner(RecordingModel(model), kv_cache, attention, **sizes)  # type: ignore[arg-type]


@dataclass
class Generation:
    """A sequence in the driver's hands."""

    slot: int
    prompt: list[int]
    num_computed: int = 0
    output: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < len(self.prompt)


class RunnerDriver:
    """Keeps step ids, slots and blocks."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = list(range(runner.limits.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._next_step = 1
        self._next_slot = 0
        self._pending = StepPlan(step_id=0)

    def open(
        self, prompt: list[int], num_new: int, block_ids: Sequence[int] | None = None, **settings: Any
    ) -> Generation:
        """Open the next slot, with blocks for the prompt and `num_new` tokens, in the next step."""
        slot, self._next_slot = self._next_slot, self._next_slot + 1
        num_blocks = -(-(len(prompt) + num_new) // BLOCK_SIZE)
        if block_ids is None:
            block_ids = [self._free.pop() for _ in range(num_blocks)]
        opening = OpenSlot(slot, slot, (slot,), 0.0, 1.0, 0, None)
        self._pending.opened_slots.append(replace(opening, **settings))
        self._pending.table_deltas.append(TableDelta(slot, 0, tuple(block_ids), (1,) * len(block_ids)))
        return Generation(slot, prompt)

    def step(self, sequences: Sequence[Generation], chunk: int = 512) -> StepSamples:
        """One step: the next `chunk` prompt tokens of each sequence, or one decode."""
        plan = replace(self._pending, step_id=self._next_step)
        self._pending = StepPlan(step_id=0)
        self._next_step += 1
        sampling = []
        for sequence in sequences:
            start, prompt = sequence.num_computed, sequence.prompt
            length = min(chunk, len(prompt) - start) if sequence.is_prefilling else 1
            flags = RowFlag.NONE if sequence.is_prefilling else FED
            if sequence.is_prefilling:
                plan.token_ids.extend(prompt[start : start + length])
            sequence.num_computed += length
            if not sequence.is_prefilling:
                flags |= SAMPLE
                sampling.append(sequence)
            plan.slots.append(sequence.slot)
            plan.starts.append(start)
            plan.lengths.append(length)
            plan.flags.append(flags)
        samples = self.runner.execute(plan)
        for index, (sequence, token_id) in enumerate(zip(sampling, samples.token_ids, strict=True)):
            sequence.output.append(token_id)
            sequence.logits.append(self.runner.model.last_logits[index])  # type: ignore[attr-defined]
        return samples

    def generate(self, sequences: Sequence[Generation], num_new: int, chunk: int = 512) -> None:
        """Step until each sequence has `num_new` tokens; prompts of different lengths mix prefill and decode."""
        while unfinished := [sequence for sequence in sequences if len(sequence.output) < num_new]:
            self.step(unfinished, chunk)
