"""Scheduler and KV manager cores with a scripted worker, under random orders of delivery."""

from __future__ import annotations

import random

import pytest

from octavo.common.messages.generation import FinishReason
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.sequence import choice_seed
from octavo.simulator.scripted_worker import expected_output
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import VOCAB, RandomTraffic, greedy, some_prompt


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 100])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request_gets_exactly_its_tokens(length: int, depth: int) -> None:
    cluster = StepCluster(settings=CoreSettings(max_num_batched_tokens=8, pipeline_depth=depth))
    request = cluster.submit(some_prompt(length), max_tokens=20)
    cluster.run()
    assert cluster.output(request) == greedy(some_prompt(length), 20)
    assert cluster.finish_reason(request) is FinishReason.LENGTH
    cluster.assert_idle()


def test_a_prompt_wholly_in_cache_leaves_its_last_block_to_compute() -> None:
    cluster = StepCluster()
    for length, hit in [(16, 12), (17, 16), (15, 12), (4, 0), (1, 0)]:
        prompt = some_prompt(length, first=length)
        first = cluster.submit(prompt, max_tokens=1)
        cluster.run()
        second = cluster.submit(prompt, max_tokens=1)
        cluster.run()
        assert cluster.cached_tokens[first] == 0
        assert cluster.cached_tokens[second] == hit
        assert cluster.output(first) == cluster.output(second) == greedy(prompt, 1)
    cluster.assert_idle()


def test_the_next_turn_finds_the_answer_of_the_last_one_in_cache() -> None:
    cluster = StepCluster()
    prompt = some_prompt(10)
    cluster.submit(prompt, max_tokens=10)
    cluster.run()
    follow_up = prompt + greedy(prompt, 10) + [5, 6, 7]
    second = cluster.submit(follow_up, max_tokens=3)
    cluster.run()
    assert cluster.cached_tokens[second] == 16  # the last token of an answer is never computed: 19 positions are
    assert cluster.output(second) == greedy(follow_up, 3)


def test_without_prefix_cache_nothing_is_found() -> None:
    cluster = StepCluster(settings=CoreSettings(max_num_batched_tokens=32, prefix_cache=False))
    prompt = some_prompt(33)
    for _ in range(2):
        request = cluster.submit(prompt, max_tokens=4)
        cluster.run()
        assert cluster.cached_tokens[request] == 0
        assert cluster.output(request) == greedy(prompt, 4)


def test_salts_keep_equal_prompts_apart() -> None:
    cluster = StepCluster()
    prompt = some_prompt(20)
    hits = []
    for salt in [b"blue", b"", b"blue"]:
        request = cluster.submit(prompt, max_tokens=1, cache_salt=salt)
        cluster.run()
        hits.append(cluster.cached_tokens[request])
    assert hits == [0, 0, 16]


def test_end_of_sequence_ends_and_ignore_eos_does_not() -> None:
    prompt = some_prompt(9)
    answer = greedy(prompt, 12)
    eos = answer[5]
    until_eos = answer[: answer.index(eos) + 1]
    cluster = StepCluster(eos_token_ids=(eos,))
    stopped = cluster.submit(prompt, max_tokens=12)
    ignored = cluster.submit(prompt, max_tokens=12, ignore_eos=True)
    own_stop = cluster.submit(prompt, max_tokens=12, ignore_eos=True, stop_token_ids=(eos,))
    cluster.run()
    assert (cluster.output(stopped), cluster.finish_reason(stopped)) == (until_eos, FinishReason.STOP)
    assert cluster.finished[stopped, 0].stop_token_id is None
    assert (cluster.output(ignored), cluster.finish_reason(ignored)) == (answer, FinishReason.LENGTH)
    assert (cluster.output(own_stop), cluster.finished[own_stop, 0].stop_token_id) == (until_eos, eos)
    cluster.assert_idle()


def test_choices_share_the_prompt_and_draw_apart() -> None:
    cluster = StepCluster(max_num_seqs=8)
    prompt = some_prompt(10)
    request = cluster.submit(prompt, max_tokens=9, n=4, temperature=1.0, seed=11)
    cluster.run()
    for choice in range(4):
        expected = expected_output(prompt, 9, VOCAB, choice_seed(11, choice), 1.0)
        assert cluster.output(request, choice) == expected
    assert len({tuple(cluster.output(request, choice)) for choice in range(4)}) == 4
    cluster.assert_idle()


def test_more_choices_than_slots_all_finish() -> None:
    cluster = StepCluster(max_num_seqs=3, num_blocks=20)
    prompt = some_prompt(11)
    request = cluster.submit(prompt, max_tokens=6, n=10)
    cluster.run()
    assert [cluster.output(request, choice) for choice in range(10)] == [greedy(prompt, 6)] * 10
    cluster.assert_idle()


def test_one_choice_is_aborted_and_the_others_go_on() -> None:
    cluster = StepCluster()
    prompt = some_prompt(70)
    request = cluster.submit(prompt, max_tokens=8, n=3)
    cluster.abort(request, 0)  # before the prompt is computed: its sequence still computes it for the others
    cluster.run()
    assert cluster.finish_reason(request, 0) is FinishReason.ABORT
    assert cluster.output(request, 0) == []
    assert cluster.output(request, 1) == cluster.output(request, 2) == greedy(prompt, 8)
    cluster.assert_idle()


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    cluster = StepCluster(num_blocks=400, max_model_len=1600, settings=CoreSettings(max_num_batched_tokens=32))
    decoding = cluster.submit(some_prompt(4), max_tokens=200)
    while len(cluster.output(decoding)) < 5:
        cluster.step()
    long = cluster.submit(some_prompt(1000, first=3), max_tokens=1)
    while cluster.worker.largest_step < 32:
        cluster.step()
    before = len(cluster.output(decoding))
    short = cluster.submit(some_prompt(12, first=5), max_tokens=3)
    while (short, 0) not in cluster.finished:
        cluster.step()
    assert len(cluster.output(decoding)) - before <= 12
    assert cluster.output(long) == []
    cluster.run()
    assert cluster.output(long) == greedy(some_prompt(1000, first=3), 1)
    assert cluster.worker.largest_step <= 32


def test_a_long_prompt_gets_on_while_short_ones_keep_coming() -> None:
    """Its wait is bounded: it has its share of every step, so many short ones come meanwhile and no more (chk-681)."""
    cluster = StepCluster(num_blocks=400, max_model_len=1600, settings=CoreSettings(max_num_batched_tokens=32))
    long = cluster.submit(some_prompt(600, first=3), max_tokens=1)
    num_short = 0
    while (long, 0) not in cluster.finished:
        if len(cluster.finished) == num_short:  # one is always there
            num_short += 1
            cluster.submit(some_prompt(40, first=5 + num_short), max_tokens=1)
        cluster.step()
    assert 3 <= num_short <= 600 // 16 + 2
    cluster.run()
    assert cluster.output(long) == greedy(some_prompt(600, first=3), 1)
    cluster.assert_idle()


def test_a_cold_burst_up_to_the_limit_decodes_together() -> None:
    cluster = StepCluster(max_num_seqs=4, num_blocks=200, max_model_len=400)
    requests = [cluster.submit(some_prompt(37, first=first), max_tokens=50, ignore_eos=True) for first in range(4)]
    while not cluster.finished:
        cluster.step()
    assert min(len(cluster.output(request)) for request in requests) > 30
    cluster.run()
    cluster.assert_idle()


def test_a_pool_full_of_cached_blocks_admits_at_once() -> None:
    cluster = StepCluster(num_blocks=20)
    for first in range(4):
        cluster.submit(some_prompt(18, first=first), max_tokens=2)
        cluster.run()
    assert cluster.pool.blocks.counts().cached >= 16
    request = cluster.submit(some_prompt(40, first=50), max_tokens=8)
    cluster.run()
    assert cluster.output(request) == greedy(some_prompt(40, first=50), 8)
    assert cluster.core.stats.num_preemptions == 0


def test_a_lone_sequence_may_grow_to_the_whole_pool() -> None:
    cluster = StepCluster(num_blocks=5, max_num_seqs=2)
    request = cluster.submit(some_prompt(3), max_tokens=17)
    cluster.run()
    assert cluster.output(request) == greedy(some_prompt(3), 17)
    cluster.assert_idle()


def test_what_can_never_fit_fails_and_the_next_is_served() -> None:
    cluster = StepCluster(num_blocks=5, max_num_seqs=2)
    too_long = cluster.submit(some_prompt(30), max_tokens=1)
    too_many = cluster.submit(some_prompt(10), max_tokens=11)
    fits = cluster.submit(some_prompt(10), max_tokens=10)
    cluster.run()
    assert cluster.failed[too_long].reason == cluster.failed[too_many].reason == "PROMPT_TOO_LONG"
    assert cluster.output(fits) == greedy(some_prompt(10), 10)


def test_bad_submissions_fail_alone() -> None:
    cluster = StepCluster()
    good = cluster.submit([1, 2, 3], max_tokens=5)
    bad = [
        cluster.submit([], max_tokens=1),
        cluster.submit([1, VOCAB], max_tokens=1),
        cluster.submit([-1], max_tokens=1),
        cluster.submit([1], max_tokens=0),
        cluster.submit([1], max_tokens=1, n=0),
        cluster.submit([1], max_tokens=1, temperature=float("nan")),
        cluster.submit([1], max_tokens=1, top_p=0.0),
    ]
    cluster.run()
    assert set(cluster.failed) == set(bad)
    assert cluster.output(good) == greedy([1, 2, 3], 5)


def test_preempted_sequences_finish_with_the_same_tokens() -> None:
    """Eight sequences in a pool for three: exact lengths, no token lost or doubled, several preemptions each."""
    for seed in range(20):
        cluster = StepCluster(num_blocks=24, max_num_seqs=8, max_model_len=96, seed=seed)
        prompts = [some_prompt(9 + first, first=first) for first in range(8)]
        requests = [cluster.submit(prompt, max_tokens=40) for prompt in prompts]
        cluster.run()
        for request, prompt in zip(requests, prompts, strict=True):
            assert cluster.output(request) == greedy(prompt, 40)
        assert cluster.core.stats.num_preemptions > 0
        cluster.assert_idle()


def test_a_full_queue_refuses() -> None:
    cluster = StepCluster(max_num_seqs=1, settings=CoreSettings(max_num_batched_tokens=32, max_num_waiting=2))
    requests = [cluster.submit([1, 2], max_tokens=3) for _ in range(5)]
    cluster.run()
    assert [cluster.failed[request].reason for request in requests if request in cluster.failed] == ["QUEUE_FULL"] * 2
    assert sum((request, 0) in cluster.finished for request in requests) == 3


def test_a_full_queue_takes_one_request_of_a_tenant_that_has_none_in_it() -> None:
    cluster = StepCluster(max_num_seqs=1, settings=CoreSettings(max_num_batched_tokens=32, max_num_waiting=2))
    crowd = [cluster.submit([1, 2], max_tokens=3, tenant="crowd") for _ in range(5)]
    lone = [cluster.submit([1, 2], max_tokens=3, tenant="lone") for _ in range(2)]
    cluster.run()
    assert [request for request in (*crowd, *lone) if request in cluster.failed] == [*crowd[3:], lone[1]]
    assert (lone[0], 0) in cluster.finished


def test_a_lost_pool_costs_a_pause_and_no_token() -> None:
    cluster = StepCluster(num_blocks=40, max_num_seqs=4)
    prompts = [some_prompt(5 + 3 * first, first=first) for first in range(6)]
    requests = [cluster.submit(prompt, max_tokens=15, n=2) for prompt in prompts]
    for _ in range(5):
        for _ in range(60):
            cluster.step()
        cluster.crash()
    cluster.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert cluster.output(request, 0) == cluster.output(request, 1) == greedy(prompt, 15)
    cluster.assert_idle()


@pytest.mark.parametrize("seed", range(60))
def test_random_traffic_ends_right_and_leaves_nothing(seed: int) -> None:
    """Mixed lengths, shared prefixes, choices, aborts at any moment, crashes, tiny pools, every depth."""
    dice = random.Random(seed)
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
            min_shared_blocks=dice.choice([1, 2, 4]),
        ),
        seed=seed,
    )
    traffic = RandomTraffic(cluster, dice)
    for _ in range(40):
        traffic.go_on()
        if dice.random() < 0.05:
            cluster.crash()
        for _ in range(dice.randrange(0, 40)):
            cluster.step()
    cluster.run()
    traffic.assert_exact()
