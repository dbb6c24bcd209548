"""Many prompts that begin alike, at once: the shared part is computed once, whatever happens to who computes it."""

from __future__ import annotations

import random

import pytest

from octavo.common.messages.generation import FinishReason
from octavo.scheduler.core import CoreSettings
from octavo.simulator.scripted_worker import expected_output
from octavo.simulator.step_cluster import StepCluster

VOCAB = 97


def some_prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * place + place * place) % VOCAB for place in range(length)]


def burst_cluster(**options: object) -> StepCluster:
    return StepCluster(
        num_blocks=400,
        max_num_seqs=24,
        max_model_len=600,
        settings=CoreSettings(max_num_batched_tokens=128),
        **options,  # type: ignore[arg-type]
    )


def computed_prompt_tokens(cluster: StepCluster, requests: list[int], num_prompt_tokens: int) -> int:
    return sum(num_prompt_tokens - cluster.cached_tokens[request] for request in requests)


@pytest.mark.parametrize("seed", range(5))
def test_twenty_at_once_compute_their_prefix_once(seed: int) -> None:
    cluster = burst_cluster(seed=seed)
    prefix = some_prompt(200)
    prompts = [[*prefix, *some_prompt(5, first=own)] for own in range(20)]
    requests = [cluster.submit(prompt, max_tokens=3) for prompt in prompts]
    cluster.run()
    assert [cluster.output(request) for request in requests] == [expected_output(one, 3, VOCAB) for one in prompts]
    assert computed_prompt_tokens(cluster, requests, 205) == 200 + 20 * 5
    cluster.assert_idle()


def test_others_do_not_wait_behind_followers() -> None:
    cluster = StepCluster(num_blocks=400, max_model_len=600, settings=CoreSettings(max_num_batched_tokens=16))
    prefix = some_prompt(500)
    leader, follower = (cluster.submit([*prefix, own], max_tokens=1) for own in (1, 2))
    other = cluster.submit(some_prompt(7, first=9), max_tokens=1)
    while (other, 0) not in cluster.finished:
        cluster.step()
    assert (leader, 0) not in cluster.finished
    assert (follower, 0) not in cluster.finished
    cluster.run()
    assert cluster.cached_tokens[follower] == 500


def test_a_follower_begins_as_soon_as_its_own_part_is_next() -> None:
    """It shares only the beginning of what the leader computes, and does not wait for the end."""
    cluster = burst_cluster()
    long = some_prompt(560)
    leader = cluster.submit(long, max_tokens=1)
    follower = cluster.submit([*long[:100], *some_prompt(8, first=50)], max_tokens=1)
    while (follower, 0) not in cluster.finished:
        cluster.step()
    assert (leader, 0) not in cluster.finished
    assert cluster.cached_tokens[follower] == 100


def test_when_the_leader_is_aborted_a_follower_leads() -> None:
    cluster = burst_cluster()
    prompt = some_prompt(400)
    requests = [cluster.submit(prompt, max_tokens=2) for _ in range(6)]
    while not cluster.core.num_parked:
        cluster.step()
    cluster.abort(requests[0])
    cluster.run()
    assert all(cluster.output(request) == expected_output(prompt, 2, VOCAB) for request in requests[1:])
    assert computed_prompt_tokens(cluster, requests[1:], 400) <= 400 + 4 * 4
    cluster.assert_idle()


def test_a_follower_that_leaves_is_forgotten() -> None:
    cluster = burst_cluster()
    prompt = some_prompt(400)
    requests = [cluster.submit(prompt, max_tokens=2) for _ in range(4)]
    while not cluster.core.num_parked:
        cluster.step()
    for request in requests[1:]:
        cluster.abort(request)
    cluster.run()
    assert cluster.output(requests[0]) == expected_output(prompt, 2, VOCAB)
    cluster.assert_idle()


def test_after_the_deadline_a_follower_computes_for_itself() -> None:
    cluster = StepCluster(
        num_blocks=400,
        max_model_len=600,
        settings=CoreSettings(max_num_batched_tokens=16, single_flight_timeout_s=0.01),
    )
    prompt = some_prompt(300)
    leader, follower = (cluster.submit(prompt, max_tokens=1) for _ in range(2))
    while not cluster.core.num_parked:
        cluster.step()
    cluster.now += 1.0
    cluster.abort(999)  # nothing happens but that time has passed
    assert cluster.core.num_parked == 0
    cluster.run()
    assert cluster.output(leader) == cluster.output(follower) == expected_output(prompt, 1, VOCAB)
    assert cluster.cached_tokens[follower] < 296
    cluster.assert_idle()


def test_an_urgent_follower_lends_its_priority_to_its_leader() -> None:
    """The leader, of low priority, shares its steps with another prompt of low priority that came first."""
    ends = []
    for is_lent in (False, True):
        cluster = StepCluster(num_blocks=400, max_model_len=600, settings=CoreSettings(max_num_batched_tokens=64))
        cluster.submit(some_prompt(500, first=3), max_tokens=1, priority=5)
        leader = cluster.submit(some_prompt(500), max_tokens=1, priority=5)
        if is_lent:
            cluster.submit(some_prompt(500), max_tokens=1, priority=0)
        while (leader, 0) not in cluster.finished:
            cluster.step()
        ends.append(cluster.core.stats.num_steps)
    assert ends[1] <= ends[0]


def test_priority_goes_first_and_nobody_waits_for_ever() -> None:
    cluster = StepCluster(max_num_seqs=1, num_blocks=40)
    running = cluster.submit(some_prompt(8), max_tokens=4)
    patient = cluster.submit(some_prompt(8, first=2), max_tokens=4, priority=1)
    urgent = cluster.submit(some_prompt(8, first=3), max_tokens=4)
    cluster.run()
    assert list(cluster.finished) == [(running, 0), (urgent, 0), (patient, 0)]


def test_without_a_prefix_cache_nobody_waits() -> None:
    cluster = StepCluster(
        num_blocks=400, max_model_len=600, settings=CoreSettings(max_num_batched_tokens=64, prefix_cache=False)
    )
    requests = [cluster.submit(some_prompt(100), max_tokens=2) for _ in range(4)]
    cluster.run()
    assert cluster.core.stats.num_single_flight_waits == 0
    assert [cluster.cached_tokens[request] for request in requests] == [0] * 4


def test_a_long_prompt_is_hashed_off_the_step_while_others_are_admitted() -> None:
    cluster = StepCluster(
        num_blocks=2000, max_model_len=7000, settings=CoreSettings(max_num_batched_tokens=512), max_num_seqs=8
    )
    long = cluster.submit(some_prompt(6000), max_tokens=1)
    short = cluster.submit(some_prompt(30, first=5), max_tokens=1)
    cluster.run()
    assert cluster.output(long) == expected_output(some_prompt(6000), 1, VOCAB)
    assert list(cluster.finished) == [(short, 0), (long, 0)]
    cluster.assert_idle()


def test_reasons_add_up_to_all_blocks_looked_up() -> None:
    cluster = burst_cluster()
    for first in (0, 0, 1):
        for salt in (b"", b"other"):
            cluster.submit(some_prompt(100, first=first), max_tokens=20, cache_salt=salt)
    cluster.run()
    stats = cluster.pool.stats
    missed = sum(stats.num_missed_blocks.values())
    assert stats.num_prefix_hit_blocks > 0
    assert stats.num_prefix_hit_blocks + missed == stats.num_prefix_lookup_blocks == 6 * 25


@pytest.mark.parametrize("seed", range(40))
def test_bursts_of_equal_prompts_end_right(seed: int) -> None:
    """Equal prompts, priorities, aborts of leaders, crashes, and pools so small that leaders are preempted."""
    dice = random.Random(seed)
    cluster = StepCluster(
        num_blocks=dice.choice([16, 24, 60, 200]),
        block_size=dice.choice([1, 4, 8]),
        max_num_seqs=dice.choice([2, 5, 8, 16]),
        max_model_len=dice.choice([30, 90]),
        settings=CoreSettings(
            max_num_batched_tokens=dice.choice([16, 32]),
            pipeline_depth=dice.choice([1, 2, 2, 3]),
            credits_per_sequence=dice.choice([1, 2]),
            single_flight_timeout_s=dice.choice([0.005, 0.05, 1e9]),
        ),
        seed=seed,
    )
    limit = cluster.model.max_model_len
    heads = [some_prompt(dice.randrange(1, limit), first=first) for first in range(2)]
    submitted: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    for _ in range(12):
        head = dice.choice(heads)
        for _ in range(dice.choice([1, 2, 6])):
            prompt = (head + some_prompt(dice.randrange(0, 3), first=dice.randrange(3)))[: limit - 1]
            max_tokens = dice.randrange(1, min(20, limit - len(prompt) + 1) + 1)
            max_tokens = min(max_tokens, limit - len(prompt))
            n = dice.choice([1, 1, 1, 3])
            request = cluster.submit(
                prompt, max_tokens, n=n, priority=dice.choice([0, 0, 1, -1]), cache_salt=dice.choice([b"", b"", b"s"])
            )
            submitted[request] = (prompt, max_tokens)
        for _ in range(dice.randrange(0, 60)):
            cluster.step()
        if dice.random() < 0.5:
            request = dice.choice(list(submitted))
            aborted.add(request)
            cluster.abort(request)
        if dice.random() < 0.1:
            cluster.crash()
    cluster.run()
    assert cluster.failed == {}
    for request, (prompt, max_tokens) in submitted.items():
        answer = expected_output(prompt, max_tokens, VOCAB)
        if cluster.finish_reason(request) is FinishReason.ABORT:
            assert request in aborted
            answer = answer[: len(cluster.output(request))]
        assert cluster.output(request) == answer
    cluster.assert_idle()
