"""Which graph runs a step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from octavo.worker.step_graphs import MIXED_BUCKETS, GraphKey, StepGraphs, bucket_sizes


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)


def captured(max_num_seqs: int, max_num_tokens: int, has_prefixes: bool) -> StepGraphs:
    graphs = StepGraphs(max_num_seqs, max_num_tokens, has_prefixes)
    graphs._graphs = dict.fromkeys(graphs.keys)  # type: ignore[arg-type]
    return graphs


def test_padding_wastes_at_most_an_eighth_of_a_large_batch() -> None:
    for smaller, size in pairwise(bucket_sizes(1024)):
        assert size - (smaller + 1) <= max(7, size / 8)
    for smaller, size in pairwise(MIXED_BUCKETS):
        assert size - (smaller + 1) <= max(31, size / 8)
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(100)[-2:] == [96, 100]


@pytest.mark.usefixtures("no_streams")
def test_the_smallest_graph_that_holds_a_step_runs_it() -> None:
    graphs = captured(64, 512, has_prefixes=True)
    assert graphs.decode_key(3, False) == GraphKey(4, False)
    assert graphs.decode_key(3, True) == GraphKey(8, True)
    assert graphs.decode_key(65, False) is None

    assert graphs.mixed_key(33, False, lambda key: True) == GraphKey(64, False, True)
    assert graphs.mixed_key(64, True, lambda key: True) == GraphKey(64, True, True)
    assert graphs.mixed_key(33, False, lambda key: key.bucket > 100) == GraphKey(128, False, True)
    assert graphs.mixed_key(513, False, lambda key: True) is None
    assert graphs.mixed_key(33, False, lambda key: False) is None


@pytest.mark.usefixtures("no_streams")
def test_no_graph_is_larger_than_a_step_or_read_before_it_is_captured() -> None:
    graphs = captured(16, 96, has_prefixes=False)
    assert {key.bucket for key in graphs.keys if key.is_mixed} == {32, 64, 96}
    assert not any(key.has_prefixes for key in graphs.keys)
    assert [key.bucket for key in graphs.keys] == sorted((key.bucket for key in graphs.keys), reverse=True)
    assert graphs.mixed_key(20, True, lambda key: True) is None

    fresh = StepGraphs(16, 96, False)
    assert fresh.decode_key(1, False) is None
    assert fresh.mixed_key(20, False, lambda key: True) is None
