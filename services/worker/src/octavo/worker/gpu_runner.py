"""The runner of a GPU: launches steps without waiting for the device; those that are not large are graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.common.messages.kv import BlockCopy
from octavo.common.messages.step import RowFlag, StepPlan
from octavo.worker.attention_triton import TritonAttention, TritonStep
from octavo.worker.gpu_batch import GpuBatch
from octavo.worker.gpu_ruled_draws import DrawnRow, redraw
from octavo.worker.gpu_step import PendingLogprobs, StepResults, StepWithTransfers
from octavo.worker.grammars import Grammars
from octavo.worker.kernels.compile_ahead import compiling_ahead
from octavo.worker.kernels.copy_blocks import copy_blocks
from octavo.worker.kernels.decode_rows import make_scratch
from octavo.worker.kernels.paged_prefill import queries_per_tile
from octavo.worker.kernels.paged_prefix import members_per_tile
from octavo.worker.kernels.sample import DrawColumns, sample
from octavo.worker.kernels.step_inputs import append_to_tables, locate_tokens
from octavo.worker.kv_cache import KvCache
from octavo.worker.models.gpu_decoder import GpuModel
from octavo.worker.models.rotary import cos_sin_table
from octavo.worker.models.weights import Progress
from octavo.worker.plan_check import check_plan
from octavo.worker.prompt_logprobs import ROWS_AT_ONCE, PendingPromptLogprobs, prompt_logprobs
from octavo.worker.prompt_parts import prompt_parts
from octavo.worker.runner import LaunchedStep, Runner
from octavo.worker.slots import StepLimits
from octavo.worker.step_buffer import Int32Array, StepBuffer
from octavo.worker.step_columns import (
    NO_COLUMNS,
    NUM_DRAW_COLUMNS,
    NUM_TOKEN_COLUMNS,
    MixedColumns,
    StepColumns,
    TokenColumns,
    decode_rows,
    draw_columns,
    token_columns,
)
from octavo.worker.step_graphs import GraphKey, Step, StepGraphs
from octavo.worker.transfer_check import check_transfers, independent_copies, move_blocks

NUM_PINNED = 6
"""Steps whose inputs may be on their way: the deepest pipeline, and some to spare."""
MAX_TABLE_ENTRIES = 65_536
"""Entries of block tables that one copy brings; more take several."""
MAX_DRAWS_PER_SLOT = 4


class GpuRunner(Runner):
    """Owns the model, the pool, the slots, the graphs and the buffers of steps. One thread launches."""

    is_asynchronous = True

    def __init__(
        self,
        model: GpuModel,
        kv_cache: KvCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        config, device = model.config, model.device
        self.model = model
        self.limits = StepLimits(
            num_blocks=kv_cache.num_blocks,
            block_size=kv_cache.block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
        )
        group = config.num_heads // config.num_kv_heads
        shares_prefixes = all(
            layer.window is None for layer in config.attention
        )  # rows of a window see different parts of a prefix
        self._batch = self.slots = GpuBatch(
            self.limits,
            config.num_kv_heads,
            queries_per_tile(group, config.head_dim),
            members_per_tile(group, config.head_dim),
            shares_prefixes,
            device,
        )
        self._transfers = kv_cache.transfers
        self._pool_words = kv_cache.pool.view(kv_cache.num_blocks, -1).view(torch.int32)
        tables = {
            rope: cos_sin_table(rope, config.head_dim, max_model_len, device) for rope in dict.fromkeys(config.ropes)
        }
        self._attention = TritonAttention(
            kv_cache.pool,
            self._batch.tables.on_device,
            [tables[rope] for rope in config.ropes],
            make_scratch(
                self._batch.max_items(),
                max_num_batched_tokens,
                max_num_seqs,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                device,
            ),
            config.num_heads,
            config.attention,
            config.norm_eps,
            kv_cache.scales,
        )
        self._max_draws = MAX_DRAWS_PER_SLOT * max_num_seqs + 1024
        self._buffer = StepBuffer(self._capacity(), NUM_PINNED, device)
        self._token_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=device)
        self._slot_mapping = torch.zeros(max_num_batched_tokens, dtype=torch.int64, device=device)
        self._no_tokens = torch.empty(0, dtype=torch.int32, device=device)
        self._results = StepResults(self._max_draws, device)
        self._graphs = StepGraphs(max_num_seqs, max_num_batched_tokens, shares_prefixes)
        self._shapes = {
            key: self._batch.mixed_shape(key.bucket, key.has_prefixes) for key in self._graphs.keys if key.is_mixed
        }
        self._logits = torch.empty((max_num_seqs, config.vocab_size), dtype=model.dtype, device=device)

    def _capacity(self) -> int:
        limits = self.limits
        rows = 16 * (limits.max_num_seqs + self._batch.max_items())
        tiles = 2 * (limits.max_num_seqs + limits.max_num_batched_tokens)
        return 3 * limits.max_num_batched_tokens + rows + tiles + 9 * self._max_draws + 2 * MAX_TABLE_ENTRIES + 256

    def use_grammars(self, grammars: Grammars) -> None:
        """Follow grammars; without, slots that have one are refused."""
        self._batch.grammars = grammars

    @property
    def num_host_blocks(self) -> int:
        """See Runner."""
        return self._transfers.num_host_blocks

    def close_slots(self) -> None:
        """See Runner."""
        self._transfers.finished(wait=True)
        self._batch.close_all()

    @torch.inference_mode()
    def compile_steps(self, progress: Progress) -> None:
        """Compile and choose what `capture_graphs` records. To be called once, before it."""
        with compiling_ahead(progress):
            for key in self._graphs.keys:
                self._graphs.run(self._step(key))

    @torch.inference_mode()
    def capture_graphs(self, progress: Progress) -> None:
        """Record the steps. To be called once, before the first served step."""
        for index, key in enumerate(self._graphs.keys):
            self._graphs.capture(key, self._step(key))
            progress((index + 1) / len(self._graphs.keys))

    @property
    def num_graphs(self) -> int:
        """Graphs that `capture_graphs` makes."""
        return len(self._graphs.keys)

    @torch.inference_mode()
    def capture_trial_graph(self, index: int) -> None:
        """Record one step, the largest for 0, to see what memory it takes."""
        key = self._graphs.keys[index]
        with compiling_ahead():
            self._graphs.run(self._step(key))
        self._graphs.capture(key, self._step(key))

    @torch.inference_mode()
    def run_largest(self) -> None:
        """The most tokens that a step may have, and draws for all slots; nothing is stored."""
        with compiling_ahead():
            self._run_largest()
        self._run_largest()

    def _run_largest(self) -> None:
        num_tokens, num_rows = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        padding = torch.full((num_tokens,), -1, dtype=torch.int32, device=self.model.device)
        tokens = TokenColumns(padding, padding, padding)
        hidden = self._forward(StepColumns(tokens, None, None, None, None, None), None)
        draws = draw_columns(self._buffer.views(self._batch.decode_lengths(num_rows, False))[-NUM_DRAW_COLUMNS:])
        self._buffer.send(self._batch.decode_columns(StepPlan(step_id=0), num_rows))
        self._sample(hidden[:num_rows], draws)
        torch.cuda.synchronize(self.model.device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """See Runner."""
        check_plan(plan, self._batch)
        check_transfers(plan, self._batch.tables, self.num_host_blocks)
        self._results.begin()
        places, block_ids = self._batch.apply_on_host(plan)
        self._append(places, block_ids)
        move_blocks(plan, self._transfers, self._batch.tables, self._copy_blocks)
        # A plan without rows is there to wait for the copies.
        return StepWithTransfers(self._launch_rows(plan), self._transfers, waits=not plan.slots)

    def _launch_rows(self, plan: StepPlan) -> LaunchedStep:
        if not plan.slots:
            return self._results.end(0, None)
        step = self._launch_decode(plan) if self._is_decode(plan) else self._launch_mixed(plan)
        self._batch.mark_sampled(plan)
        return step

    def _append(self, places: Int32Array, block_ids: Int32Array) -> None:
        for first in range(0, len(places), MAX_TABLE_ENTRIES):
            part = slice(first, first + MAX_TABLE_ENTRIES)
            append_to_tables(self._attention.tables, *self._buffer.send([places[part], block_ids[part]]))

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for together in independent_copies(copies):
            sources = np.array([one.source_id for one in together], dtype=np.int32)
            targets = np.array([one.target_id for one in together], dtype=np.int32)
            copy_blocks(self._pool_words, *self._buffer.send([sources, targets]))

    def _is_decode(self, plan: StepPlan) -> bool:
        """Each row is one token, draws at most one, and tells nothing of a prompt."""
        is_other = RowFlag.FAN_OUT | RowFlag.PROMPT_LOGPROBS
        return sum(plan.lengths) == len(plan.slots) and not any(flags & is_other for flags in plan.flags)

    def _launch_decode(self, plan: StepPlan) -> LaunchedStep:
        prefixes = self._batch.prefixes(plan, plan.slots, [start + 1 for start in plan.starts])
        key = self._graphs.decode_key(len(plan.slots), prefixes is not None)
        if key is None:
            return self._launch_mixed(plan)
        self._buffer.send(self._batch.decode_columns(plan, key.bucket, prefixes))
        self._graphs.replay(key)
        sampling = [row for row, flags in enumerate(plan.flags) if flags & RowFlag.SAMPLE]
        self._redraw(plan, sampling, sampling, sampling)
        logprobs = self._logprobs([plan.slots[row] for row in sampling], sampling, sampling)
        return self._results.end(len(plan.slots), logprobs, None if len(sampling) == len(plan.slots) else sampling)

    def _step(self, key: GraphKey) -> Step:
        """What the graph runs, on columns at fixed places."""
        columns = self._mixed_columns_of(key) if key.is_mixed else self._decode_columns_of(key)
        torch.cuda.current_stream().synchronize()

        def step() -> None:
            self._compute(columns)

        return step

    # Graphs are captured on columns of no rows: whatever the buffer held, the kernels stay within bounds.

    def _mixed_columns_of(self, key: GraphKey) -> StepColumns:
        empty = NO_COLUMNS.padded(self._shapes[key])
        return empty.on_device(self._buffer.send(empty.columns))

    def _decode_columns_of(self, key: GraphKey) -> StepColumns:
        self._buffer.on_device.zero_()
        self._buffer.send(self._batch.decode_columns(StepPlan(step_id=0), key.bucket)[:NUM_TOKEN_COLUMNS])
        views = self._buffer.views(self._batch.decode_lengths(key.bucket, key.has_prefixes))
        decodes, prefixes = decode_rows(views[NUM_TOKEN_COLUMNS:-NUM_DRAW_COLUMNS])
        tokens, draws = token_columns(views[:NUM_TOKEN_COLUMNS]), draw_columns(views[-NUM_DRAW_COLUMNS:])
        return StepColumns(tokens, decodes, prefixes, None, None, draws)

    def _launch_mixed(self, plan: StepPlan) -> LaunchedStep:
        mixed = self._batch.mixed_columns(plan)
        prompt = None
        if (key := self._mixed_key(plan, mixed)) is not None:
            self._buffer.send(mixed.padded(self._shapes[key]).columns)
            self._graphs.replay(key)
        else:
            columns = mixed.on_device(self._buffer.send(mixed.columns))
            prompt = self._compute(columns, plan)
        if not mixed.draws:
            return self._results.end(0, None, prompt=prompt)
        sampling = [row for row, flags in enumerate(plan.flags) if flags & (RowFlag.SAMPLE | RowFlag.FAN_OUT)]
        logits_rows = mixed.draws[1].tolist()
        first_places = np.searchsorted(logits_rows, range(len(sampling))).tolist()
        self._redraw(plan, sampling, range(len(sampling)), first_places)
        slots = [plan.slots[sampling[row]] for row in logits_rows]
        logprobs = self._logprobs(slots, logits_rows, range(len(logits_rows)))
        return self._results.end(len(logits_rows), logprobs, prompt=prompt)

    def _mixed_key(self, plan: StepPlan, mixed: MixedColumns) -> GraphKey | None:
        """The graph that runs the step; none tells anything of a prompt."""
        if _tells_of_prompts(plan):
            return None
        return self._graphs.mixed_key(
            len(mixed.tokens[0]), mixed.has_prefixes, lambda key: self._shapes[key].holds(mixed)
        )

    def _compute(self, columns: StepColumns, plan: StepPlan | None = None) -> PendingPromptLogprobs | None:
        """The model, what the plan wants to know of prompts, and the draws."""
        drawn = columns.drawn_tokens
        if plan is not None and _tells_of_prompts(plan):
            hidden = self._forward(columns, None)
            prompt = self._prompt_logprobs(plan, hidden)
            hidden = hidden if drawn is None else hidden.index_select(0, drawn)
        else:
            hidden, prompt = self._forward(columns, self._no_tokens if columns.draws is None else drawn), None
        if columns.draws is not None:
            self._sample(hidden, columns.draws)
        return prompt

    def _forward(self, columns: StepColumns, wanted: Tensor | None) -> Tensor:
        """Hidden states of the wanted tokens; None: of all."""
        tokens = columns.tokens
        num_tokens = len(tokens.slots)
        token_ids, slot_mapping = self._token_ids[:num_tokens], self._slot_mapping[:num_tokens]
        locate_tokens(
            tokens.slots,
            tokens.positions,
            tokens.sent,
            self._batch.last_sampled,
            self._attention.tables,
            self.limits.block_size,
            token_ids,
            slot_mapping,
        )
        step = TritonStep(
            self._attention, tokens.positions, slot_mapping, columns.decodes, columns.prefixes, columns.prefills
        )
        return self.model.forward(token_ids, step, wanted)

    def _sample(self, hidden: Tensor, draws: DrawColumns) -> None:
        """Leaves the logits, one row for each of `hidden`, where `_logprobs` reads them."""
        logits = self.model.logits(hidden, self._logits[: len(hidden)])
        sample(logits, draws, self._batch.last_sampled, self._results.token_ids[: len(draws.rows)])

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> PendingPromptLogprobs | None:
        """Of the rows that are flagged for it. Uses the place of the logits, before the draws do."""
        return prompt_logprobs(
            prompt_parts(plan, self._batch.slots),
            hidden,
            lambda rows: self.model.logits(rows, self._logits[: len(rows)]),
            lambda values: _to_device(values, self.model.device),
            _to_host,
            min(ROWS_AT_ONCE, len(self._logits)),
        )

    def _redraw(
        self, plan: StepPlan, sampling: Sequence[int], logits_rows: Sequence[int], places: Sequence[int]
    ) -> None:
        """By the rules of those slots that have any.

        `sampling` are the plan's rows that draw; then the rows of logits that they draw from, and the places of their
        first tokens.
        """
        batch = self._batch
        if not batch.rules:
            return
        rows = [
            DrawnRow(
                plan.slots[row], logits_row, place, batch.seeds_of_row(plan, row), plan.starts[row] + plan.lengths[row]
            )
            for row, logits_row, place in zip(sampling, logits_rows, places, strict=True)
        ]
        redraw(rows, batch, self._logits, self._results.token_ids, self._buffer)

    def _logprobs(
        self, slots: Sequence[int], logits_rows: Sequence[int], places: Sequence[int]
    ) -> PendingLogprobs | None:
        """Log-probabilities of the draws that ask for them, on their way to the host.

        Draw i is of slot `slots[i]`, made from row `logits_rows[i]` of the logits, its token at `places[i]`.
        """
        opened = [self._batch.slots[slot] for slot in slots]
        counts = [None if one is None else one.num_logprobs for one in opened]
        asking = [draw for draw, count in enumerate(counts) if count is not None]
        if not asking:
            return None
        rows, token_places = (
            _to_device([of[draw] for draw in asking], self.model.device) for of in (logits_rows, places)
        )
        logprobs = self._logits.index_select(0, rows).float().log_softmax(-1)
        token_ids = self._results.token_ids.index_select(0, token_places).clamp_min(0).to(torch.int64)
        best = logprobs.topk(max(1, *(count or 0 for count in counts)))
        return PendingLogprobs(
            counts=counts,
            chosen=_to_host(logprobs.gather(1, token_ids[:, None])[:, 0]),
            best_ids=_to_host(best.indices),
            best=_to_host(best.values),
        )


def _tells_of_prompts(plan: StepPlan) -> bool:
    return any(flags & RowFlag.PROMPT_LOGPROBS for flags in plan.flags)


def _to_device(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values).pin_memory().to(device, non_blocking=True)


def _to_host(values: Tensor) -> Tensor:
    """Pinned memory that holds the values once the stream is there."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
