from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from octavo.worker.kernels.sample import DrawColumns, sample

VOCAB_SIZE = 40


def draw(
    logits: Tensor,
    rows: list[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    fed_slots: list[int] | None = None,
    last_sampled: Tensor | None = None,
) -> list[int]:
    """The tokens of draws that share their settings."""
    device, count = logits.device, len(rows)
    seeds = seeds or list(range(count))
    halves = [[half - 2**32 if half >= 2**31 else half for half in (seed % 2**32, seed >> 32)] for seed in seeds]
    columns = DrawColumns(
        rows=torch.tensor(rows, dtype=torch.int32, device=device),
        temperatures=torch.full((count,), temperature, device=device),
        top_ps=torch.full((count,), top_p, device=device),
        top_ks=torch.full((count,), top_k, dtype=torch.int32, device=device),
        seeds=torch.tensor(halves, dtype=torch.int32, device=device),
        positions=torch.tensor(positions or [5] * count, dtype=torch.int32, device=device),
        fed_slots=torch.tensor(fed_slots or [-1] * count, dtype=torch.int32, device=device),
    )
    token_ids = torch.full((count,), -9, dtype=torch.int32, device=device)
    if last_sampled is None:
        last_sampled = torch.zeros(4, dtype=torch.int32, device=device)
    sample(logits, columns, last_sampled, token_ids)
    return token_ids.tolist()


def num_draws(device: str, wanted: int) -> int:
    """Fewer in the interpreter, which takes milliseconds for each."""
    return wanted if device == "cuda" else min(wanted, 60) // 3 * 2


def test_without_temperature_the_largest_logit_wins_and_ties_go_to_the_lowest_token(device: str) -> None:
    logits = torch.zeros(2, 10_000, device=device)
    logits[0, 9_999] = 1.0
    logits[1, [4_321, 8_765]] = 2.0

    assert draw(logits, [0, 1], temperature=0.0) == [9_999, 4_321]


def test_a_row_with_a_logit_that_is_not_finite_gives_no_token(device: str) -> None:
    logits = torch.randn(3, VOCAB_SIZE, device=device)
    logits[0, 3] = torch.nan
    logits[1, 5] = torch.inf

    assert draw(logits, [0, 1, 2], temperature=0.0) == [-1, -1, int(logits[2].argmax())]
    assert draw(logits, [0, 1])[:2] == [-1, -1]


def test_the_chosen_token_feeds_the_slot_of_its_draw(device: str) -> None:
    logits = torch.zeros(2, VOCAB_SIZE, device=device)
    logits[0, 7], logits[1, 9] = 1.0, 1.0
    last_sampled = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)

    draw(logits, [0, 1, 1], temperature=0.0, fed_slots=[2, 0, -1], last_sampled=last_sampled)

    assert last_sampled.tolist() == [9, 2, 7]


def test_a_draw_depends_on_its_seed_and_position_only(device: str) -> None:
    logits = torch.zeros(1, VOCAB_SIZE, device=device)
    alone = [draw(logits, [0], seeds=[seed], positions=[place])[0] for seed, place in ((1, 5), (2, 5), (1, 6))]

    assert draw(logits, [0, 0, 0], seeds=[1, 2, 1], positions=[5, 5, 6]) == alone
    assert len(set(draw(logits, [0] * 24, seeds=[9 + (seed << 32) for seed in range(24)]))) > 8


def test_tokens_come_as_often_as_their_probabilities_say(device: str) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = (probabilities.log() * 2).to(device)[None]  # at temperature 2 the probabilities as given

    count = num_draws(device, 4000)
    counts = Counter(draw(logits, [0] * count, temperature=2.0))

    shares = [counts[token] / count for token in range(4)]
    assert shares == pytest.approx(probabilities.tolist(), abs=3 / count**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {0, 2}),
        ({"top_p": 0.45}, {2}),
        ({"top_p": 0.55}, {0, 2}),
        ({"top_p": 0.85}, {0, 2, 3}),
        ({"top_k": 3, "top_p": 0.8}, {0, 2}),
    ],
)
def test_filters_leave_only_the_most_likely_tokens(
    filters: dict[str, float], kept: set[int], dtype: torch.dtype, device: str
) -> None:
    probabilities = torch.tensor([0.3, 0.07, 0.5, 0.1, 0.03])
    logits = probabilities.log().to(dtype).to(device)[None]

    assert set(draw(logits, [0] * num_draws(device, 60), **filters)) == kept  # type: ignore[arg-type]
