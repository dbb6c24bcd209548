"""Branches from choices that run or are kept, over the real cores with a scripted worker."""

from __future__ import annotations

import pytest

from octavo.common.messages.generation import FinishReason
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.sequence import choice_seed
from octavo.simulator.scripted_worker import expected_output
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import VOCAB, greedy, some_prompt


def without_cache() -> CoreSettings:
    """What is shared then is shared by the branch, and by nothing else."""
    return CoreSettings(max_num_batched_tokens=32, prefix_cache=False)


def expire_all(cluster: StepCluster) -> None:
    cluster.pass_time(1000.0)
    cluster.run()
    cluster.assert_idle()


def test_a_kept_answer_goes_on_where_it_ended() -> None:
    cluster = StepCluster(settings=without_cache())
    prompt = some_prompt(21)
    first = cluster.submit(prompt, max_tokens=10, keep_s=60.0)
    cluster.run()
    branch = cluster.submit([], max_tokens=8, branch=(first, 0, None))
    cluster.run()
    assert cluster.output(branch) == greedy(prompt, 18)[10:]
    assert cluster.cached_tokens[branch] == 30  # of 31: the last token of an answer is never computed
    expire_all(cluster)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 20, 24, 30, 31])
def test_a_branch_shares_the_tokens_up_to_any_place_and_goes_on_with_others(num_tokens: int) -> None:
    cluster = StepCluster(settings=without_cache())
    prompt = some_prompt(21)
    first = cluster.submit(prompt, max_tokens=10, keep_s=60.0)
    cluster.run()
    whole = prompt + greedy(prompt, 10)
    suffix = some_prompt(30, first=5)
    branch = cluster.submit(suffix, max_tokens=6, branch=(first, 0, num_tokens))
    cluster.run()
    assert cluster.output(branch) == greedy(whole[:num_tokens] + suffix, 6)
    assert cluster.prompt_tokens[branch] == num_tokens + 30
    assert cluster.cached_tokens[branch] == min(num_tokens, 30)
    expire_all(cluster)


def test_many_branches_of_one_answer_do_not_disturb_one_another() -> None:
    cluster = StepCluster(num_blocks=200, settings=without_cache())
    prompt = some_prompt(18)
    root = cluster.submit(prompt, max_tokens=7, keep_s=60.0)
    cluster.run()
    whole = prompt + greedy(prompt, 7)
    branches = {
        cluster.submit([token], max_tokens=9, branch=(root, 0, 19 + token), keep_s=60.0): [*whole[: 19 + token], token]
        for token in range(6)
    }
    cluster.run()
    for branch, start in branches.items():
        assert cluster.output(branch) == greedy(start, 9)
        leaf = cluster.submit([1, 2], max_tokens=3, branch=(branch, 0, None))
        cluster.run()
        assert cluster.output(leaf) == greedy([*start, *greedy(start, 9), 1, 2], 3)
    expire_all(cluster)


def test_a_branch_of_a_running_answer_takes_the_tokens_that_are_there() -> None:
    for num_messages in range(0, 60, 2):
        cluster = StepCluster(settings=without_cache(), seed=num_messages)
        prompt = some_prompt(13)
        parent = cluster.submit(prompt, max_tokens=20)
        for _ in range(num_messages):
            cluster.step()
        if (parent, 0) in cluster.finished:
            break
        so_far = prompt + cluster.output(parent)
        branch = cluster.submit([9, 8, 7], max_tokens=5, branch=(parent, 0, None))
        cluster.run()
        assert cluster.output(branch) == greedy([*so_far, 9, 8, 7], 5)
        assert cluster.output(parent) == greedy(prompt, 20)
        cluster.assert_idle()


def test_a_branch_samples_as_it_likes() -> None:
    cluster = StepCluster()
    prompt = some_prompt(10)
    root = cluster.submit(prompt, max_tokens=5, n=2, temperature=1.0, seed=3, keep_s=60.0)
    cluster.run()
    start = prompt + cluster.output(root, 1)
    sampled = cluster.submit([], max_tokens=6, n=3, temperature=1.0, seed=8, branch=(root, 1, None))
    searched = cluster.submit([4], max_tokens=6, n=2, beam_width=2, branch=(root, 1, None))
    cluster.run()
    for choice in range(3):
        assert cluster.output(sampled, choice) == expected_output(start, 6, VOCAB, choice_seed(8, choice), 1.0)
    assert len(cluster.output(searched, 0)) == len(cluster.output(searched, 1)) == 6
    again = cluster.submit([*start, 4], max_tokens=6, n=2, beam_width=2)
    cluster.run()
    assert cluster.output(again, 1) == cluster.output(searched, 1)
    expire_all(cluster)


def test_an_answer_of_a_beam_search_can_be_branched_from() -> None:
    cluster = StepCluster()
    prompt = some_prompt(10)
    root = cluster.submit(prompt, max_tokens=6, n=2, beam_width=2, keep_s=60.0)
    cluster.run()
    branch = cluster.submit([], max_tokens=4, branch=(root, 1, None))
    cluster.run()
    assert cluster.output(branch) == greedy(prompt + cluster.output(root, 1), 4)
    expire_all(cluster)


def test_what_is_unknown_expired_forgotten_or_of_another_salt_is_not_found() -> None:
    cluster = StepCluster()
    prompt = some_prompt(10)
    kept = cluster.submit(prompt, max_tokens=2, keep_s=5.0, cache_salt=b"blue")
    forgotten = cluster.submit(prompt, max_tokens=2, keep_s=5.0)
    not_kept = cluster.submit(prompt, max_tokens=2)
    cluster.run()
    cluster.forget(kept)  # of another salt: nothing happens
    cluster.forget(forgotten)
    found = cluster.submit([1], max_tokens=1, branch=(kept, 0, None), cache_salt=b"blue")
    missing = [
        cluster.submit([1], max_tokens=1, branch=(kept, 0, None)),
        cluster.submit([1], max_tokens=1, branch=(kept, 1, None), cache_salt=b"blue"),
        cluster.submit([1], max_tokens=1, branch=(forgotten, 0, None)),
        cluster.submit([1], max_tokens=1, branch=(not_kept, 0, None)),
        cluster.submit([1], max_tokens=1, branch=(12345, 0, None)),
    ]
    cluster.run()
    cluster.pass_time(5.0)
    missing.append(cluster.submit([1], max_tokens=1, branch=(kept, 0, None), cache_salt=b"blue"))
    cluster.run()
    assert (found, 0) in cluster.finished
    assert {request: failure.reason for request, failure in cluster.failed.items()} == dict.fromkeys(
        missing, "UNKNOWN_RESPONSE"
    )
    cluster.assert_idle()


def test_a_place_that_the_answer_does_not_have_is_refused() -> None:
    cluster = StepCluster()
    kept = cluster.submit(some_prompt(10), max_tokens=2, keep_s=5.0)
    cluster.run()
    for num_tokens in (0, 13):
        request = cluster.submit([1], max_tokens=1, branch=(kept, 0, num_tokens))
        assert cluster.failed[request].reason == "INVALID_REQUEST"
        assert "have 12 at present" in cluster.failed[request].message
    expire_all(cluster)


def test_kept_answers_give_way_before_anybody_is_preempted_and_their_tokens_stay() -> None:
    cluster = StepCluster(num_blocks=16)
    kept = [cluster.submit(some_prompt(14, first), max_tokens=2, keep_s=60.0) for first in range(3)]
    cluster.run()
    assert cluster.pool.blocks.counts().active == 12
    large = cluster.submit(some_prompt(30, first=60), max_tokens=30)
    cluster.run()
    assert cluster.output(large) == greedy(some_prompt(30, first=60), 30)
    assert cluster.core.stats.num_preemptions == 0
    for first, request in enumerate(kept):
        branch = cluster.submit([5], max_tokens=4, branch=(request, 0, None))
        cluster.run()
        prompt = some_prompt(14, first)
        assert cluster.output(branch) == greedy([*prompt, *greedy(prompt, 2), 5], 4)
    expire_all(cluster)


def test_kept_answers_beyond_the_limit_are_forgotten_oldest_first() -> None:
    cluster = StepCluster(settings=CoreSettings(max_num_batched_tokens=32, max_num_kept=2))
    kept = [cluster.submit(some_prompt(9, first), max_tokens=2, keep_s=60.0) for first in range(4)]
    cluster.run()
    branches = [cluster.submit([], max_tokens=1, branch=(request, 0, None)) for request in kept]
    cluster.run()
    assert len(cluster.failed) == 2
    assert set(cluster.failed) < set(branches)
    expire_all(cluster)


def test_an_answer_that_ended_by_its_text_is_kept_up_to_there() -> None:
    cluster = StepCluster()
    prompt = some_prompt(9)
    request = cluster.submit(prompt, max_tokens=50, keep_s=60.0)
    while len(cluster.output(request)) < 8:
        cluster.step()
    cluster.abort(request, 0, num_output_tokens=6)
    cluster.run()
    assert cluster.finish_reason(request) is FinishReason.ABORT
    branch = cluster.submit([3], max_tokens=4, branch=(request, 0, None))
    cluster.run()
    assert cluster.output(branch) == greedy([*prompt, *greedy(prompt, 6), 3], 4)
    expire_all(cluster)


def test_a_lost_pool_costs_the_blocks_of_kept_answers_and_not_their_tokens() -> None:
    cluster = StepCluster()
    prompt = some_prompt(9)
    kept = cluster.submit(prompt, max_tokens=6, keep_s=60.0)
    cluster.run()
    cluster.crash()
    branch = cluster.submit([3], max_tokens=4, branch=(kept, 0, None))
    cluster.run()
    assert cluster.cached_tokens[branch] == 0
    assert cluster.output(branch) == greedy([*prompt, *greedy(prompt, 6), 3], 4)
    expire_all(cluster)
