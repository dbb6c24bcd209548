"""Preemption by swap and the host tier, over the real cores, under random orders of delivery and late copies."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from octavo.common.messages.generation import FinishReason
from octavo.kvmanager.host_tier import HostTierSettings
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.preemption import PreemptionSettings
from octavo.scheduler.sequence import SequenceState
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import RandomTraffic, greedy, some_prompt

SWAP = CoreSettings(max_num_batched_tokens=32, preemption=PreemptionSettings(mode="swap"))


def crowded(seed: int = 0, num_host_blocks: int = 60, settings: CoreSettings = SWAP) -> StepCluster:
    """A pool for three of the eight sequences that will want it."""
    return StepCluster(
        num_blocks=24, max_num_seqs=8, max_model_len=96, num_host_blocks=num_host_blocks, settings=settings, seed=seed
    )


def states(cluster: StepCluster) -> list[SequenceState]:
    return [sequence.state for request in cluster.core._requests for sequence in request.live.values() if sequence]


def test_swapped_sequences_finish_with_the_same_tokens_and_nothing_is_computed_twice() -> None:
    for seed in range(20):
        cluster = crowded(seed, settings=CoreSettings(32, prefix_cache=False, preemption=PreemptionSettings("swap")))
        prompts = [some_prompt(9 + first, first=first) for first in range(8)]
        requests = [cluster.submit(prompt, max_tokens=40) for prompt in prompts]
        cluster.run()
        for request, prompt in zip(requests, prompts, strict=True):
            assert cluster.output(request) == greedy(prompt, 40)
        kinds = cluster.core.stats.num_preemptions_by_kind
        assert kinds["swap"] + kinds["partial_swap"] > 0
        assert kinds["recompute"] == kinds["overdue"] == 0
        cluster.assert_idle()


def test_host_full_means_recompute_and_no_error() -> None:
    """Swap space for a few blocks only, many choices of each prompt: everything finishes (swp-e8e)."""
    for seed in range(10):
        cluster = crowded(seed, num_host_blocks=7)
        prompts = [some_prompt(9 + first, first=first) for first in range(6)]
        requests = [cluster.submit(prompt, max_tokens=30, n=3) for prompt in prompts]
        cluster.run()
        for request, prompt in zip(requests, prompts, strict=True):
            assert [cluster.output(request, choice) for choice in range(3)] == [greedy(prompt, 30)] * 3
        assert cluster.core.stats.num_preemptions_by_kind["recompute"] > 0
        cluster.assert_idle()


def test_no_new_prompt_is_admitted_while_a_swapped_sequence_waits() -> None:
    cluster = crowded()
    for first in range(5):
        cluster.submit(some_prompt(20, first=first), max_tokens=40)
    while not cluster.core._life.pool.swapping.swapped:
        assert cluster.step()
    late = cluster.submit(some_prompt(4, first=60), max_tokens=2)
    while cluster.core._life.pool.swapping.num_swapped:
        assert late not in cluster.cached_tokens
        cluster.step()
    cluster.run()
    assert cluster.output(late) == greedy(some_prompt(4, first=60), 2)
    cluster.assert_idle()


@pytest.mark.parametrize(
    "state",
    [SequenceState.LEAVING, SequenceState.SWAPPING_OUT, SequenceState.SWAPPED, SequenceState.SWAPPING_IN],
)
def test_a_sequence_is_aborted_on_its_way_to_the_host_in_it_and_on_its_way_back(state: SequenceState) -> None:
    """And aborted twice; host copies are given back too (swp-435)."""
    num_aborted = 0
    for seed in range(20):
        cluster = crowded(seed)
        prompts = [some_prompt(20, first=first) for first in range(5)]
        requests = [cluster.submit(prompt, max_tokens=40) for prompt in prompts]
        while state not in states(cluster) and cluster.step():
            pass
        if state not in states(cluster):
            continue
        num_aborted += 1
        request_no = next(one.request_no for one in cluster.core._requests if one.leader.state is state)
        cluster.abort(request_no)
        cluster.abort(request_no)
        cluster.run()
        for request, prompt in zip(requests, prompts, strict=True):
            answer = cluster.output(request)
            assert answer == greedy(prompt, 40)[: len(answer)]
            assert (cluster.finish_reason(request) is FinishReason.ABORT) == (request == request_no)
        cluster.assert_idle()
    assert num_aborted > 0


def test_a_swapped_sequence_that_waits_too_long_is_computed_again() -> None:
    settings = CoreSettings(32, preemption=PreemptionSettings("swap", swap_timeout_s=0.02))
    cluster = crowded(settings=settings)
    requests = [cluster.submit(some_prompt(20, first=first), max_tokens=60) for first in range(6)]
    cluster.run()
    assert cluster.core.stats.num_preemptions_by_kind["overdue"] > 0
    for first, request in enumerate(requests):
        assert cluster.output(request) == greedy(some_prompt(20, first=first), 60)
    cluster.assert_idle()


def test_the_cost_model_swaps_once_the_link_has_been_seen_to_be_fast() -> None:
    """Copies at 50,000 blocks a second, against 32,000 tokens a second to compute again, at 4 tokens a block."""
    cluster = crowded(settings=CoreSettings(32, prefix_cache=False))
    for first in range(30):
        cluster.submit(some_prompt(20, first=first), max_tokens=40)
    cluster.run()
    kinds = cluster.core.stats.num_preemptions_by_kind
    assert kinds["swap"] + kinds["partial_swap"] > 3
    assert cluster.core._life.preemption.cost.blocks_per_s == pytest.approx(50_000)
    cluster.assert_idle()


def test_an_evicted_prefix_comes_back_from_the_host() -> None:
    """Local, host and computed tokens add up to the prompt at each admission (met-3ba)."""
    cluster = StepCluster(num_blocks=20, num_host_blocks=40, settings=SWAP)
    prompt = some_prompt(40)
    cluster.submit(prompt, max_tokens=2)
    cluster.run()
    for first in range(3):
        cluster.submit(some_prompt(60, first=50 + first), max_tokens=2)
        cluster.run()
    again = cluster.submit(prompt, max_tokens=10)
    cluster.run()
    assert cluster.output(again) == greedy(prompt, 10)
    assert cluster.cached_tokens[again] == 36
    assert cluster.stats.num_host_hit_tokens == cluster.core.stats.num_host_prompt_tokens == 36
    cluster.assert_idle()


def test_what_was_forgotten_is_not_found_in_the_host_nor_on_its_way_there() -> None:
    """tier-2da: also with the flush in the middle of a spill."""
    cluster = StepCluster(num_blocks=20, num_host_blocks=40, settings=SWAP)
    prompt = some_prompt(40)
    cluster.submit(prompt, max_tokens=2)
    cluster.run()
    cluster.submit(some_prompt(76, first=50), max_tokens=2)
    while not any(cluster.pool.tier.transfers):
        assert cluster.step()
    cluster.pool.tier.forget_cached()
    num_begun_before = cluster.stats.num_sunk_blocks
    cluster.run()
    assert cluster.pool.counts().host_cached == cluster.stats.num_sunk_blocks - num_begun_before
    cluster.pool.tier.forget_cached()
    again = cluster.submit(prompt, max_tokens=2)
    cluster.run()
    assert cluster.cached_tokens[again] == cluster.stats.num_host_hit_tokens == 0
    cluster.assert_idle()


def test_a_lower_priority_gives_way_and_waits() -> None:
    cluster = crowded()
    urgent = cluster.submit(some_prompt(20, first=1), max_tokens=40, priority=0)
    batch = [cluster.submit(some_prompt(20, first=first), max_tokens=40, priority=5) for first in range(2, 6)]
    later = cluster.submit(some_prompt(20, first=9), max_tokens=40, priority=0)
    cluster.run()
    ends = list(cluster.finished)
    assert ends.index((urgent, 0)) < 2
    assert ends.index((later, 0)) < max(ends.index((request, 0)) for request in batch)
    cluster.assert_idle()


@pytest.mark.parametrize("seed", range(80))
def test_random_traffic_with_host_memory_ends_right_and_leaves_nothing(seed: int) -> None:
    run_random_traffic(seed)


def run_random_traffic(seed: int) -> StepCluster:
    """Mixed lengths, shared prefixes, choices, priorities, aborts at any moment, crashes, tiny pools, every depth."""
    dice = random.Random(seed)
    mode: Literal["auto", "recompute", "swap"] = dice.choice(["auto", "swap", "swap", "swap", "recompute"])
    cluster = StepCluster(
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
            preemption=PreemptionSettings(
                mode, min_progress=dice.choice([1, 4, 16]), swap_timeout_s=dice.choice([0.01, 0.1, 10.0, 10.0])
            ),
        ),
        num_host_blocks=dice.choice([3, 10, 30, 100]),
        host_tier=HostTierSettings(max_sinking_blocks=dice.choice([0, 1, 64, 64])),
        watermark=dice.choice([0.01, 0.01, 0.2]),
        seed=seed,
    )
    traffic = RandomTraffic(cluster, dice, priorities=(0, 0, 0, -1, 3))
    for _ in range(40):
        traffic.go_on()
        if dice.random() < 0.03:
            cluster.crash()
        for _ in range(dice.randrange(0, 40)):
            cluster.step()
    cluster.run()
    traffic.assert_exact()
    return cluster
