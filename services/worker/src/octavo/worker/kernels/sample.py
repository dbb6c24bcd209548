"""Chooses tokens from logits, each by its own settings, seed and position, without asking the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Logits that one load fetches."""
SPLITS = 8
"""Programs that share a row of logits."""


@triton.jit
def _ordered(x, DROPPED: tl.constexpr):
    """Integers in the order of the floats; their lowest DROPPED bits, which are those of a shorter type, go."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> DROPPED


@triton.jit
def _find_thresholds_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    draw_rows_ptr,  # int32 [num_draws] |-> row of logits
    temperatures_ptr,  # float32 [num_draws]
    top_ps_ptr,  # float32 [num_draws]
    top_ks_ptr,  # int32 [num_draws], 0 for all
    thresholds_ptr,  # out: int32 [num_draws], the lowest ordered logit that may be drawn
    vocab_size,
    row_stride,
    DROPPED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Bisects to the top_k-th logit, then to the one at which the share of what is left reaches top_p.

    Logits that tie with the last one kept are kept. Grid: (num_draws,).
    """
    draw = tl.program_id(0)
    temperature = tl.load(temperatures_ptr + draw)
    top_p = tl.load(top_ps_ptr + draw)
    top_k = tl.load(top_ks_ptr + draw)
    lowest = -(1 << (31 - DROPPED))
    threshold = lowest
    if (temperature > 0.0) & ((top_p < 1.0) | (top_k > 0)):
        row_ptr = logits_ptr + tl.load(draw_rows_ptr + draw).to(tl.int64) * row_stride
        token = tl.arange(0, TILE)
        largest = tl.full([TILE], float("-inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            inside = start + token < vocab_size
            x = tl.load(row_ptr + start + token, mask=inside, other=float("-inf")).to(tl.float32)
            largest = tl.maximum(largest, x)
        best = tl.max(largest, 0)
        highest = _ordered(best, DROPPED)
        if top_k > 0:
            threshold = highest
            step = tl.cast(1 << (30 - DROPPED), tl.int64)
            # Invariant: the answer lies in [low, low + 2 * step).
            low = tl.cast(lowest, tl.int64)
            for _ in range(32 - DROPPED):
                middle = low + step
                count = tl.zeros([TILE], tl.int32)
                for start in range(0, vocab_size, TILE):
                    inside = start + token < vocab_size
                    x = tl.load(row_ptr + start + token, mask=inside, other=float("-inf")).to(tl.float32)
                    count += (inside & (_ordered(x, DROPPED).to(tl.int64) >= middle)).to(tl.int32)
                low = tl.where(tl.sum(count, 0) >= top_k, middle, low)
                step = step // 2
            threshold = low.to(tl.int32)
        if top_p < 1.0:
            mass = tl.zeros([TILE], tl.float32)
            for start in range(0, vocab_size, TILE):
                inside = start + token < vocab_size
                x = tl.load(row_ptr + start + token, mask=inside, other=float("-inf")).to(tl.float32)
                kept = inside & (_ordered(x, DROPPED) >= threshold)
                mass += tl.where(kept, tl.exp((x - best) / temperature), 0.0)
            wanted = tl.sum(mass, 0) * top_p
            low = tl.cast(threshold, tl.int64)
            step = tl.cast(1 << (31 - DROPPED), tl.int64)
            for _ in range(33 - DROPPED):
                middle = low + step
                mass = tl.zeros([TILE], tl.float32)
                if middle <= highest:
                    for start in range(0, vocab_size, TILE):
                        inside = start + token < vocab_size
                        x = tl.load(row_ptr + start + token, mask=inside, other=float("-inf")).to(tl.float32)
                        kept = inside & (_ordered(x, DROPPED).to(tl.int64) >= middle)
                        mass += tl.where(kept, tl.exp((x - best) / temperature), 0.0)
                low = tl.where(tl.sum(mass, 0) >= wanted, middle, low)
                step = step // 2
            threshold = low.to(tl.int32)
    tl.store(thresholds_ptr + draw, threshold)


@triton.jit
def _choose_in_part_kernel(
    logits_ptr,  # [num_rows, vocab_size]
    draw_rows_ptr,  # int32 [num_draws] |-> row of logits
    temperatures_ptr,  # float32 [num_draws]; 0 takes the largest logit
    seeds_ptr,  # int32 [num_draws, 2]: low and high half
    positions_ptr,  # int32 [num_draws]: index of the new token in its sequence
    thresholds_ptr,  # int32 [num_draws]
    best_values_ptr,  # out: float32 [num_draws, SPLITS]; NaN if a logit is not finite
    best_tokens_ptr,  # out: int32 [num_draws, SPLITS]
    vocab_size,
    part_size,
    row_stride,
    DROPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest of logit / temperature + Gumbel noise in a part of the vocabulary. Grid: (num_draws, SPLITS).

    The noise depends on (seed, position, token) only, so the draw does not depend on the batch.
    """
    draw, part = tl.program_id(0), tl.program_id(1)
    row_ptr = logits_ptr + tl.load(draw_rows_ptr + draw).to(tl.int64) * row_stride
    temperature = tl.load(temperatures_ptr + draw)
    begin = part * part_size
    end = tl.minimum(begin + part_size, vocab_size)
    lane = tl.arange(0, TILE)
    best_value = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.full([TILE], 2147483647, tl.int32)
    is_odd = tl.zeros([TILE], tl.int32)
    if temperature == 0.0:
        for start in range(begin, end, TILE):
            token = start + lane
            x = tl.load(row_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
            is_odd |= ((token < end) & ~(tl.abs(x) < float("inf"))).to(tl.int32)
            is_better = x > best_value
            best_value = tl.where(is_better, x, best_value)
            best_token = tl.where(is_better, token, best_token)
    else:
        threshold = tl.load(thresholds_ptr + draw)
        low = tl.load(seeds_ptr + 2 * draw).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(seeds_ptr + 2 * draw + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
        seed = low | (high << 32)
        position = tl.load(positions_ptr + draw)
        zero = tl.zeros([TILE], tl.int32)
        for start in range(begin, end, TILE):
            token = start + lane
            x = tl.load(row_ptr + token, mask=token < end, other=float("-inf")).to(tl.float32)
            is_odd |= ((token < end) & ~(tl.abs(x) < float("inf"))).to(tl.int32)
            bits, _, _, _ = tl.philox(seed, token, zero + position, zero, zero)
            v = (bits.to(tl.float32) + 0.5) * (2.0**-32)  # [0, 1]
            waiting = tl.where(v < 0.00390625, v * (1.0 + v * (0.5 + v / 3.0)), -tl.log(1.0 - v))  # -log(1 - v)
            value = x / temperature - tl.log(waiting)
            value = tl.where((token < end) & (_ordered(x, DROPPED) >= threshold), value, float("-inf"))
            is_better = value > best_value
            best_value = tl.where(is_better, value, best_value)
            best_token = tl.where(is_better, token, best_token)
    largest = tl.max(best_value, 0)
    chosen = tl.min(tl.where(best_value == largest, best_token, 2147483647), 0)
    value = tl.where(tl.max(is_odd, 0) > 0, float("nan"), largest)
    tl.store(best_values_ptr + draw * SPLITS + part, value)
    tl.store(best_tokens_ptr + draw * SPLITS + part, chosen)


@triton.jit
def _choose_kernel(
    best_values_ptr,  # float32 [num_draws, SPLITS]
    best_tokens_ptr,  # int32 [num_draws, SPLITS]
    fed_slots_ptr,  # int32 [num_draws] |-> slot that the token feeds, -1 for none
    last_sampled_ptr,  # out: int32 [num_slots]
    token_ids_ptr,  # out: int32 [num_draws]; -1 if a logit is not finite
    SPLITS: tl.constexpr,
):
    """The best of the parts; ties go to the lowest token. Grid: (num_draws,)."""
    draw = tl.program_id(0)
    part = tl.arange(0, SPLITS)
    values = tl.load(best_values_ptr + draw * SPLITS + part)
    tokens = tl.load(best_tokens_ptr + draw * SPLITS + part)
    is_odd = tl.max((values != values).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(values != values, float("-inf"), values), 0)
    chosen = tl.min(tl.where(values == largest, tokens, 2147483647), 0)
    tl.store(token_ids_ptr + draw, tl.where(is_odd, -1, chosen))
    slot = tl.load(fed_slots_ptr + draw)
    if slot >= 0:
        tl.store(last_sampled_ptr + slot, tl.where(is_odd, 0, chosen))


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """The draws of a step, on the device."""

    rows: Tensor  # int32 [num_draws] |-> row of logits
    temperatures: Tensor  # float32 [num_draws]; 0 takes the largest logit
    top_ps: Tensor  # float32 [num_draws]
    top_ks: Tensor  # int32 [num_draws], 0 for all
    seeds: Tensor  # int32 [num_draws, 2]: low and high half
    positions: Tensor  # int32 [num_draws]: index of the new token in its sequence
    fed_slots: Tensor  # int32 [num_draws] |-> slot that the token feeds, -1 for none


def sample(logits: Tensor, draws: DrawColumns, last_sampled: Tensor, token_ids: Tensor) -> None:
    """Write the chosen tokens to `token_ids` and, by `fed_slots`, to `last_sampled`; all tensors int32.

    `logits` is [num_rows, vocab_size] of any float type. A token is -1, and feeds 0, where a logit is not finite.
    Draws without filter cost one pass over the logits, those with one about 20 (bfloat16) or 36 (float32).
    """
    vocab_size = logits.shape[1]
    num_draws, device = len(draws.rows), logits.device
    dropped = 16 if logits.dtype == torch.bfloat16 else 0
    thresholds = torch.empty(num_draws, dtype=torch.int32, device=device)
    values = torch.empty((num_draws, SPLITS), dtype=torch.float32, device=device)
    tokens = torch.empty((num_draws, SPLITS), dtype=torch.int32, device=device)
    _find_thresholds_kernel[(num_draws,)](
        logits,
        draws.rows,
        draws.temperatures,
        draws.top_ps,
        draws.top_ks,
        thresholds,
        vocab_size,
        logits.stride(0),
        DROPPED=dropped,
        TILE=TILE,
        num_warps=8,
    )
    part_size = triton.cdiv(triton.cdiv(vocab_size, SPLITS), 16) * 16
    _choose_in_part_kernel[(num_draws, SPLITS)](
        logits,
        draws.rows,
        draws.temperatures,
        draws.seeds,
        draws.positions,
        thresholds,
        values,
        tokens,
        vocab_size,
        part_size,
        logits.stride(0),
        DROPPED=dropped,
        SPLITS=SPLITS,
        TILE=TILE,
        num_warps=4,
    )
    _choose_kernel[(num_draws,)](values, tokens, draws.fed_slots, last_sampled, token_ids, SPLITS=SPLITS, num_warps=1)
