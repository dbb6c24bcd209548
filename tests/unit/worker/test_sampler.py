"""Choosing tokens: against numpy, against chance, alone and in batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.worker.sampler import NUM_LIKELY, Draw, sample
from octavo.worker.uniforms import uniforms

VOCAB_SIZE = 3000


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, spread: float = 2.0) -> torch.Tensor:
    return torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(3)) * spread


def probabilities(logits: torch.Tensor, draw: Draw) -> np.ndarray:
    """The distribution that temperature, then top_k, then top_p leave, in plain numpy."""
    scaled = logits.numpy().astype(np.float64) / draw.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights)
    if draw.top_k:
        weights[order[draw.top_k :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= draw.top_p]] = 0
    kept: np.ndarray = weights / weights.sum()
    return kept


def draw_many(logits: torch.Tensor, draw: Draw, num_draws: int) -> np.ndarray:
    return sample(logits[None], [replace(draw, seeds=tuple(range(num_draws)))]).token_ids.numpy()


def test_greedy_takes_the_most_likely_token() -> None:
    logits = torch.tensor([[0.1, 3.0, 2.9], [5.0, -1.0, 4.0]])
    sampled = sample(logits, [Draw((1,), 9), Draw((2,), 4)])
    assert sampled.token_ids.tolist() == [1, 0]
    assert sampled.logprobs == []


@pytest.mark.parametrize(
    "draw",
    [
        Draw((0,), 5, temperature=1.0),
        Draw((0,), 5, temperature=0.6),
        Draw((0,), 5, temperature=1.0, top_k=1),
        Draw((0,), 5, temperature=1.5, top_k=40),
        Draw((0,), 5, temperature=1.0, top_p=0.5),
        Draw((0,), 5, temperature=2.0, top_p=0.9),
        Draw((0,), 5, temperature=1.0, top_p=1e-6),
        Draw((0,), 5, temperature=1.0, top_k=10, top_p=0.8),
        Draw((0,), 5, temperature=1.0, top_k=VOCAB_SIZE + 7, top_p=0.999),
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(draw: Draw) -> None:
    """Only tokens that the filters keep are drawn, as often as they should be (chi-square, 4 sigma)."""
    logits = random_logits(1)[0]
    expected = probabilities(logits, draw)
    num_draws = 20_000
    counts = np.bincount(draw_many(logits, draw, num_draws), minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0

    frequent = expected * num_draws >= 5
    rest = max(1 - expected[frequent].sum(), 0.0)
    observed = np.append(counts[frequent], counts[~frequent].sum())
    wanted = np.append(expected[frequent], rest) * num_draws
    bins = wanted > 1e-6
    chi_square = ((observed[bins] - wanted[bins]) ** 2 / wanted[bins]).sum()
    freedom = bins.sum() - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)


def test_top_p_reaches_past_the_tokens_that_are_sorted_first() -> None:
    """Flat logits: nine tenths of the probability need far more tokens than the first sort holds."""
    logits = random_logits(1, spread=0.01)[0]
    draw = Draw((0,), 5, temperature=1.0, top_p=0.9)
    kept = np.flatnonzero(probabilities(logits, draw))
    assert len(kept) > 2 * NUM_LIKELY
    drawn = draw_many(logits, draw, 5000)
    assert set(drawn) <= set(kept)
    assert len(set(drawn)) > NUM_LIKELY


def test_result_does_not_depend_on_the_batch() -> None:
    """Greedy, filtered, seeded and fanned-out rows together give what each gives alone, in any order."""
    logits = random_logits(6)
    draws = [
        Draw((7,), 12, temperature=0.8),
        Draw((7,), 12),
        Draw((7, 8, 9), 3, temperature=1.2, top_k=50),
        Draw((2**64 - 1,), 100, temperature=1.0, top_p=0.7, num_logprobs=2),
        Draw((5, 6), 1),
        Draw((11,), 40, temperature=0.01),
    ]
    alone = [sample(logits[row : row + 1], [draw]) for row, draw in enumerate(draws)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):
        together = sample(logits[order], [draws[row] for row in order])
        assert together.token_ids.tolist() == [token for row in order for token in alone[row].token_ids.tolist()]
        assert together.first_of_draw.tolist() == [int(alone[row].token_ids[0]) for row in order]
        assert [found for found in together.logprobs if found] == alone[3].logprobs


def test_seed_and_position_decide_the_draw() -> None:
    logits = random_logits(1)[0]
    draw = Draw((41,), 7, temperature=1.0)
    first = sample(logits[None], [draw]).token_ids.tolist()
    assert sample(logits[None], [draw]).token_ids.tolist() == first
    positions = {int(sample(logits[None], [replace(draw, position=at)]).token_ids) for at in range(20)}
    seeds = {int(sample(logits[None], [replace(draw, seeds=(at,))]).token_ids) for at in range(20)}
    assert len(positions) > 10
    assert len(seeds) > 10


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    by_seed = uniforms(range(50_000), 3)
    by_position = np.array([uniforms([12345], position)[0] for position in range(5_000)])
    for numbers in (by_seed, by_position):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        expected = len(numbers) / 50
        assert ((counts - expected) ** 2 / expected).sum() < 49 + 4 * np.sqrt(2 * 49)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / np.sqrt(len(numbers))


def test_uniforms_of_a_seed_are_no_other_seeds_shifted() -> None:
    golden = 0x9E3779B97F4A7C15
    first = [uniforms([1], position)[0] for position in range(6)]
    second = [uniforms([1 + golden], position)[0] for position in range(6)]
    assert not set(first) & set(second)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_harms_itself_only(poison: float) -> None:
    logits = random_logits(4)
    draws = [Draw((1,), 1, temperature=1.0), Draw((2, 3), 1, temperature=1.0, top_p=0.9, num_logprobs=1)] * 2
    clean = sample(logits, draws).token_ids.tolist()
    poisoned = logits.clone()
    poisoned[1, 17] = poison
    sampled = sample(poisoned, draws)
    assert sampled.token_ids.tolist() == [clean[0], -1, -1, *clean[3:]]
    assert [found is None for found in sampled.logprobs] == [True, True, True, True, False, False]
    poisoned[0, 5] = poison
    greedy = [Draw((1,), 1)] * 4
    assert sample(poisoned, greedy).token_ids.tolist() == [-1, -1, *logits[2:].argmax(-1).tolist()]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(1)
    [found] = sample(logits, [Draw((1,), 1, temperature=0.3, top_k=2, num_logprobs=3)]).logprobs
    token = int(sample(logits, [Draw((1,), 1, temperature=0.3, top_k=2)]).token_ids)
    expected = logits[0].log_softmax(-1)
    assert found is not None
    assert found.sampled == pytest.approx(float(expected[token]), abs=1e-6)
    assert found.top_token_ids == tuple(expected.argsort(descending=True)[:3].tolist())
    assert found.top_logprobs == pytest.approx([float(expected[one]) for one in found.top_token_ids], abs=1e-6)


def test_zero_logprobs_reports_the_sampled_token_only() -> None:
    [found] = sample(random_logits(1), [Draw((1,), 1, num_logprobs=0)]).logprobs
    assert found is not None
    assert found.top_token_ids == ()
