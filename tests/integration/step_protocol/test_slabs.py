"""Slabs, the baseline that paging is measured against: each sequence reserves neighbouring blocks for its end."""

from __future__ import annotations

import pytest

from octavo.scheduler.core_settings import CoreSettings
from octavo.simulator.scripted_worker import expected_output
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import VOCAB, some_prompt

NUM_BLOCKS = 24
SLABS = CoreSettings(max_num_batched_tokens=32, prefix_cache=False, reservation="slabs")


def tables(cluster: StepCluster) -> list[list[int]]:
    return [table.block_ids for _, table in cluster.pool.tables]


def test_a_sequence_holds_one_run_of_blocks_for_its_longest_end_and_asks_for_no_more() -> None:
    for seed in range(10):
        cluster = StepCluster(num_blocks=NUM_BLOCKS, max_model_len=96, settings=SLABS, seed=seed)
        requests = [cluster.submit(some_prompt(9 + first, first), max_tokens=23 + first) for first in range(6)]
        most = 0
        while cluster.step():
            held = tables(cluster)
            most = max(most, len(held))
            for block_ids in held:
                assert block_ids == list(range(block_ids[0], block_ids[0] + len(block_ids)))
                assert len(block_ids) in (8, 9, 10, 11)  # of 4 tokens: 32, 34 ... 42
            assert cluster.pool.counts().granted == 0
        assert most == 2, "two slabs of 8 to 11 of the 24 blocks, never a third"
        for first, request in enumerate(requests):
            assert cluster.output(request) == expected_output(some_prompt(9 + first, first), 23 + first, VOCAB)
        assert cluster.core.stats.num_preemptions == 0
        cluster.assert_idle()


def test_pages_run_more_of_the_same_sequences_at_once() -> None:
    most = {}
    for reservation in ("pages", "slabs"):
        settings = CoreSettings(max_num_batched_tokens=32, prefix_cache=False, reservation=reservation)
        cluster = StepCluster(num_blocks=NUM_BLOCKS, max_model_len=96, settings=settings, seed=3)
        for first in range(6):
            cluster.submit(some_prompt(9, first), max_tokens=23)
        most[reservation] = 0
        while cluster.step():
            most[reservation] = max(most[reservation], cluster.core.num_running)
    assert most["slabs"] == 3
    assert most["pages"] > 3


@pytest.mark.parametrize("seed", range(5))
def test_choices_of_a_prompt_grow_by_blocks_beside_its_slab(seed: int) -> None:
    cluster = StepCluster(num_blocks=60, max_model_len=96, settings=SLABS, seed=seed)
    request = cluster.submit(some_prompt(10), max_tokens=20, n=3)
    cluster.run()
    for choice in range(3):
        assert cluster.output(request, choice) == expected_output(some_prompt(10), 20, VOCAB)
    cluster.assert_idle()


def test_an_abort_gives_the_whole_slab_back() -> None:
    cluster = StepCluster(num_blocks=NUM_BLOCKS, max_model_len=96, settings=SLABS)
    first = cluster.submit(some_prompt(8), max_tokens=80)
    while len(cluster.output(first)) < 3:
        cluster.step()
    assert tables(cluster) == [list(range(22))]
    cluster.abort(first)
    second = cluster.submit(some_prompt(8), max_tokens=80)
    cluster.run()
    assert len(cluster.output(second)) == 80
    cluster.assert_idle()
