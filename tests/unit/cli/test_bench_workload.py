"""The load of a benchmark follows from its seed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from octavo.cli.bench_workload import WorkloadShape, make_workload

SHAPE = WorkloadShape(
    num_requests=4000,
    rate=20.0,
    input_len=50,
    output_len=20,
    lengths="fixed",
    shared_prefix=8,
    max_token_id=400,
    seed=1,
)


def test_the_same_seed_makes_the_same_load_and_another_one_another() -> None:
    shape = replace(SHAPE, num_requests=20, lengths="lognormal")
    assert make_workload(shape) == make_workload(shape)
    assert make_workload(shape) != make_workload(replace(shape, seed=2))


def test_arrivals_are_a_poisson_process() -> None:
    due = [request.due_s for request in make_workload(SHAPE) if request.due_s is not None]
    assert due[0] == 0.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert variance == pytest.approx(mean**2, rel=0.1)  # as of an exponential distribution


def test_without_a_rate_nothing_is_due() -> None:
    assert {request.due_s for request in make_workload(replace(SHAPE, rate=None, num_requests=5))} == {None}


def test_fixed_lengths_are_all_alike_and_begin_with_the_shared_prefix() -> None:
    requests = make_workload(replace(SHAPE, num_requests=10))
    assert {len(request.prompt_ids) for request in requests} == {58}
    assert {request.output_len for request in requests} == {20}
    assert len({tuple(request.prompt_ids[:8]) for request in requests}) == 1
    assert len({tuple(request.prompt_ids[8:]) for request in requests}) == 10


def test_lognormal_lengths_have_the_mean_asked_for_and_a_long_tail() -> None:
    requests = make_workload(replace(SHAPE, lengths="lognormal", shared_prefix=0))
    lengths = sorted(len(request.prompt_ids) for request in requests)
    assert sum(lengths) / len(lengths) == pytest.approx(50, rel=0.05)
    assert lengths[len(lengths) // 2] < 40
    assert lengths[0] >= 1 and 150 < lengths[-1] <= 400


def test_token_ids_stay_within_the_vocabulary() -> None:
    ids = [token for request in make_workload(replace(SHAPE, num_requests=50)) for token in request.prompt_ids]
    assert (min(ids), max(ids)) == (0, 400)
