"""Links are cut and services die under the real cores: no token is lost or doubled, and what can go on goes on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.preemption import PreemptionSettings
from octavo.simulator.faulty_cluster import FaultyCluster
from support.step_traffic import RandomTraffic, greedy, some_prompt


def steps(cluster: FaultyCluster, count: int) -> None:
    for _ in range(count):
        cluster.step()


@pytest.mark.parametrize("seed", range(10))
def test_a_cut_worker_link_goes_on_where_it_ended(seed: int) -> None:
    cluster = FaultyCluster(seed=seed)
    prompts = [some_prompt(5 + 3 * first, first=first) for first in range(4)]
    requests = [cluster.submit(prompt, max_tokens=30) for prompt in prompts]
    for _ in range(8):
        steps(cluster, 40)
        cluster.cut_worker_link(absence=seed)
    cluster.run()
    assert [cluster.output(request) for request in requests] == [greedy(prompt, 30) for prompt in prompts]
    assert cluster.events["worker resumed"] >= 7
    assert cluster.core.stats.num_pool_losses == 0
    cluster.assert_idle()


@pytest.mark.parametrize("seed", range(10))
def test_a_cut_kv_link_goes_on_where_it_ended(seed: int) -> None:
    cluster = FaultyCluster(seed=seed)
    prompts = [some_prompt(5 + 3 * first, first=first) for first in range(4)]
    requests = [cluster.submit(prompt, max_tokens=30) for prompt in prompts]
    for _ in range(8):
        steps(cluster, 40)
        cluster.cut_kv_link(absence=seed)
    cluster.run()
    assert [cluster.output(request) for request in requests] == [greedy(prompt, 30) for prompt in prompts]
    assert cluster.events["KV link resumed"] >= 5
    assert cluster.core.stats.num_pool_losses == cluster.core.stats.num_preemptions == 0
    cluster.assert_idle()


def test_decode_goes_on_with_credits_while_the_kv_link_is_cut() -> None:
    cluster = FaultyCluster(num_blocks=100)
    request = cluster.submit(some_prompt(8), max_tokens=60)
    while len(cluster.output(request)) < 4:
        cluster.step()
    cluster.cut_kv_link(absence=10_000)
    before = len(cluster.output(request))
    steps(cluster, 200)
    assert 4 <= len(cluster.output(request)) - before <= 12  # two credits of four tokens, and the rest of a block
    cluster.run()
    assert cluster.output(request) == greedy(some_prompt(8), 60)
    cluster.assert_idle()


@pytest.mark.parametrize("has_catalogue", [True, False])
def test_a_new_kv_manager_makes_its_pool_of_what_is_declared(has_catalogue: bool, tmp_path: Path) -> None:
    """Nothing is computed again, and with a catalogue the prefix that only the old manager knew is still found."""
    cluster = FaultyCluster(num_blocks=200, catalogue_dir=tmp_path if has_catalogue else None)
    known = some_prompt(41, first=90)
    cluster.submit(known, max_tokens=1)
    cluster.run()
    prompts = [some_prompt(12 + 5 * first, first=first) for first in range(4)]
    requests = [cluster.submit(prompt, max_tokens=40) for prompt in prompts]
    for _ in range(5):
        steps(cluster, 60)
        cluster.restart_kvmanager()
    cluster.run()
    assert [cluster.output(request) for request in requests] == [greedy(prompt, 40) for prompt in prompts]
    stats = cluster.core.stats
    assert (stats.num_pool_losses, stats.num_preemptions, stats.num_declarations) == (0, 0, 5)
    again = cluster.submit(known, max_tokens=3)
    cluster.run()
    assert cluster.cached_tokens[again] == (40 if has_catalogue else 0)
    assert cluster.output(again) == greedy(known, 3)
    cluster.assert_idle()


def test_blocks_of_ended_sequences_are_recycled_while_nobody_manages(tmp_path: Path) -> None:
    """Two sequences end and two go on: the blocks of the first carry the others past their credits."""
    cluster = FaultyCluster(
        num_blocks=100,
        catalogue_dir=tmp_path,
        seed=5,  # at the cut there are credits left
        settings=CoreSettings(max_num_batched_tokens=32, credits_per_sequence=1),
    )
    short = [cluster.submit(some_prompt(4, first=first), max_tokens=30) for first in range(2)]
    long = [cluster.submit(some_prompt(4, first=first), max_tokens=60) for first in (10, 20)]
    while len(cluster.output(short[0])) < 28:
        cluster.step()
    cluster.cut_kv_link(absence=10_000)
    steps(cluster, 400)
    assert all((request, 0) in cluster.finished for request in short)
    assert cluster.core.stats.num_recycled_blocks > 4
    assert all((request, 0) in cluster.finished for request in long)
    cluster.run()
    assert [cluster.output(request) for request in long] == [greedy(some_prompt(4, first=f), 60) for f in (10, 20)]
    assert cluster.events["KV link resumed"] == 0  # it has to be declared
    again = cluster.submit(some_prompt(4) + greedy(some_prompt(4), 30), max_tokens=5)
    cluster.run()
    assert cluster.output(again) == greedy(some_prompt(4) + greedy(some_prompt(4), 30), 5)
    cluster.assert_idle()


def test_a_new_worker_computes_everything_again_on_a_fresh_pool(tmp_path: Path) -> None:
    cluster = FaultyCluster(catalogue_dir=tmp_path)
    prompts = [some_prompt(5 + 3 * first, first=first) for first in range(4)]
    requests = [cluster.submit(prompt, max_tokens=30, n=2) for prompt in prompts]
    for _ in range(4):
        steps(cluster, 60)
        cluster.restart_worker()
    cluster.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert cluster.output(request, 0) == cluster.output(request, 1) == greedy(prompt, 30)
    assert cluster.core.stats.num_pool_losses == 4
    cluster.assert_idle()


@pytest.mark.parametrize("seed", range(60))
def test_random_faults_cost_no_token(seed: int, tmp_path: Path) -> None:
    """Cuts, deaths and repeated messages at any moment, among traffic of every kind."""
    run_random_faults(seed, tmp_path)


def run_random_faults(seed: int, folder: Path) -> FaultyCluster:
    dice = random.Random(seed)
    cluster = FaultyCluster(
        catalogue_dir=folder if dice.random() < 0.6 else None,
        duplicate_rate=dice.choice([0.0, 0.1]),
        num_blocks=dice.choice([12, 20, 40, 80]),
        block_size=dice.choice([1, 4, 8]),
        max_num_seqs=dice.choice([1, 2, 5, 8]),
        max_model_len=dice.choice([12, 60]),
        eos_token_ids=(13,),
        settings=CoreSettings(
            max_num_batched_tokens=dice.choice([8, 16, 64]),
            pipeline_depth=dice.choice([1, 2, 2, 3]),
            prefix_cache=dice.random() < 0.8,
            credits_per_sequence=dice.choice([1, 2, 4]),
            preemption=PreemptionSettings(dice.choice(["auto", "swap", "recompute"]), min_progress=4),
        ),
        num_host_blocks=dice.choice([0, 10, 100]),
        seed=seed,
    )
    traffic = RandomTraffic(cluster, dice)
    faults = [cluster.cut_worker_link, cluster.cut_kv_link, cluster.restart_kvmanager, cluster.restart_worker]
    for _ in range(40):
        traffic.go_on()
        if dice.random() < 0.3:
            dice.choices(faults, [4, 4, 4, 1])[0](dice.choice([0, 0, 5, 50, 200]))
        steps(cluster, dice.randrange(0, 60))
    cluster.run()
    traffic.assert_exact()
    return cluster
