"""A more urgent request takes slot or blocks of a less urgent one that runs (sch-3e6), over the real cores."""

from __future__ import annotations

import pytest

from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.preemption import PreemptionMode, PreemptionSettings
from octavo.scheduler.sequence import SequenceState
from octavo.simulator.scripted_worker import expected_output
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import VOCAB, some_prompt

MIN_PROGRESS = 8


def roomy(*, seed: int = 0, depth: int = 2, max_num_seqs: int = 2) -> StepCluster:
    """Blocks for all that will come, and few slots."""
    settings = CoreSettings(
        max_num_batched_tokens=64, pipeline_depth=depth, preemption=PreemptionSettings(min_progress=MIN_PROGRESS)
    )
    return StepCluster(num_blocks=320, max_num_seqs=max_num_seqs, max_model_len=600, settings=settings, seed=seed)


def run_until_output(cluster: StepCluster, request: int, num_tokens: int) -> None:
    while len(cluster.output(request)) < num_tokens:
        assert cluster.step()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_an_urgent_request_pauses_a_less_urgent_one_for_its_slot(depth: int, seed: int) -> None:
    cluster = roomy(seed=seed, depth=depth)
    prompts = {cluster.submit(some_prompt(20, first), max_tokens=200, priority=10): first for first in (1, 2)}
    slow, slower = prompts
    run_until_output(cluster, slow, 10)
    run_until_output(cluster, slower, 10)
    urgent = cluster.submit(some_prompt(20, 3), max_tokens=20, priority=0)
    equal = cluster.submit(some_prompt(20, 4), max_tokens=20, priority=10)
    num_steps_before = cluster.core.stats.num_steps
    run_until_output(cluster, urgent, 1)
    assert cluster.core.stats.num_steps - num_steps_before <= 10
    assert cluster.core.stats.num_preemptions == 1
    run_until_output(cluster, equal, 1)
    assert set(cluster.finished) & {(slow, 0), (slower, 0)}, "it waits for a slot that comes free by itself"
    cluster.run()
    assert cluster.core.stats.num_preemptions == 1
    assert next(iter(cluster.finished)) == (urgent, 0)
    assert cluster.output(urgent) == expected_output(some_prompt(20, 3), 20, VOCAB)
    for request, first in prompts.items():
        assert cluster.output(request) == expected_output(some_prompt(20, first), 200, VOCAB)
    cluster.assert_idle()


def test_what_a_paused_request_has_computed_stays_in_the_cache() -> None:
    cluster = roomy(max_num_seqs=1)
    slow = cluster.submit(some_prompt(81, 1), max_tokens=100, priority=1)
    run_until_output(cluster, slow, 30)
    cluster.submit(some_prompt(20, 2), max_tokens=4)
    cluster.run()
    [record] = cluster.core.log.find("request-1")
    [paused] = record.sequences[0].preemptions
    assert (paused.why, paused.kind) == ("no_slot", "recompute")
    assert paused.num_computed_tokens >= 110
    assert paused.num_tokens_again is not None
    assert paused.num_tokens_again <= cluster.model.block_size
    assert cluster.output(slow) == expected_output(some_prompt(81, 1), 100, VOCAB)
    cluster.assert_idle()


def test_a_paused_request_moves_on_between_two_pauses_and_its_wait_is_bounded() -> None:
    """Urgent requests never cease to come; each one it yields to costs it at most its own tokens once."""
    cluster = roomy(max_num_seqs=1)
    slow = cluster.submit(some_prompt(20, 1), max_tokens=60, priority=1)
    run_until_output(cluster, slow, 1)
    num_urgent = 0
    while (slow, 0) not in cluster.finished:
        if len(cluster.finished) == num_urgent:  # one is always there
            num_urgent += 1
            cluster.submit(some_prompt(20, 1 + num_urgent), max_tokens=2)
        assert cluster.step()
        assert num_urgent < 500
    assert 2 <= cluster.core.stats.num_preemptions <= 60 // MIN_PROGRESS + 1
    cluster.run()
    assert cluster.output(slow) == expected_output(some_prompt(20, 1), 60, VOCAB)
    cluster.assert_idle()


def test_prompts_of_less_urgent_requests_are_no_backlog_for_an_urgent_one() -> None:
    """Two long prompts fill every step to come; the urgent one gets its share at once all the same."""
    cluster = roomy(max_num_seqs=4)
    for first in (1, 2):
        cluster.submit(some_prompt(550, first), max_tokens=4, priority=5)
    while cluster.core.num_running < 2:
        assert cluster.step()
    equal = cluster.submit(some_prompt(10, 3), max_tokens=2, priority=5)
    urgent = cluster.submit(some_prompt(10, 4), max_tokens=2, priority=0)
    num_steps_before = cluster.core.stats.num_steps
    run_until_output(cluster, urgent, 1)
    assert cluster.core.stats.num_steps - num_steps_before <= 6
    assert not cluster.output(equal)
    cluster.run()
    assert cluster.core.stats.num_preemptions == 0
    cluster.assert_idle()


def test_an_urgent_request_that_is_aborted_meanwhile_leaves_no_trace() -> None:
    for num_messages in range(12):
        cluster = roomy(seed=num_messages, max_num_seqs=1)
        slow = cluster.submit(some_prompt(20, 1), max_tokens=40, priority=1)
        run_until_output(cluster, slow, 10)
        urgent = cluster.submit(some_prompt(20, 2), max_tokens=30)
        for _ in range(num_messages):
            cluster.step()
        cluster.abort(urgent)
        cluster.run()
        assert cluster.output(slow) == expected_output(some_prompt(20, 1), 40, VOCAB)
        cluster.assert_idle()


def tight(
    num_blocks: int, *, seed: int = 0, depth: int = 2, num_host_blocks: int = 0, mode: PreemptionMode = "auto"
) -> StepCluster:
    """Slots for all that will come, and few blocks of 4 tokens."""
    preemption = PreemptionSettings(mode, min_progress=MIN_PROGRESS)
    settings = CoreSettings(max_num_batched_tokens=64, pipeline_depth=depth, preemption=preemption)
    return StepCluster(
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_model_len=96,
        num_host_blocks=num_host_blocks,
        settings=settings,
        seed=seed,
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_an_urgent_request_takes_the_blocks_of_a_less_urgent_one(depth: int, seed: int) -> None:
    """Of 40 blocks two hold 6 each and have 4 as credits; the urgent one needs 24 and waits for neither to end."""
    cluster = tight(40, seed=seed, depth=depth)
    prompts = {cluster.submit(some_prompt(22, first), max_tokens=50, priority=10): first for first in (1, 2)}
    for request in prompts:
        run_until_output(cluster, request, MIN_PROGRESS)
    urgent = cluster.submit(some_prompt(94, 3), max_tokens=2)
    equal = cluster.submit(some_prompt(94, 4), max_tokens=2, priority=10)
    num_steps_before = cluster.core.stats.num_steps
    run_until_output(cluster, urgent, 1)
    assert cluster.core.stats.num_steps - num_steps_before <= 35
    assert cluster.core.stats.num_paused == {"no_slot": 0, "no_blocks": 1}
    assert not cluster.finished
    run_until_output(cluster, equal, 1)
    assert set(cluster.finished) & {(request, 0) for request in prompts}, "it waits for blocks that come free"
    cluster.run()
    assert cluster.core.stats.num_preemptions == 1
    assert cluster.output(urgent) == expected_output(some_prompt(94, 3), 2, VOCAB)
    for request, first in prompts.items():
        assert cluster.output(request) == expected_output(some_prompt(22, first), 50, VOCAB)
    cluster.assert_idle()


def test_nobody_is_paused_for_blocks_that_would_not_suffice() -> None:
    """One as urgent holds 12 of 24 blocks and more, the less urgent one at most 5; the first in line needs 13."""
    cluster = tight(24)
    equal = cluster.submit(some_prompt(46, 1), max_tokens=20)
    less = cluster.submit(some_prompt(10, 2), max_tokens=8, priority=1)
    run_until_output(cluster, equal, 1)
    run_until_output(cluster, less, 1)
    cluster.submit(some_prompt(50, 3), max_tokens=2)
    run_until_output(cluster, equal, 19)
    assert cluster.core.stats.num_preemptions == 0
    cluster.run()
    cluster.assert_idle()


def test_an_urgent_request_that_fits_does_not_wait_behind_a_less_urgent_one_that_does_not() -> None:
    cluster = tight(20)
    running = cluster.submit(some_prompt(40, 1), max_tokens=30)
    run_until_output(cluster, running, 1)
    large = cluster.submit(some_prompt(60, 2), max_tokens=2, priority=1)
    [its_sequence] = [one for one in cluster.core.present()[2] if one.request.request_no == large]
    while its_sequence.state is not SequenceState.WAITING:  # it has asked at once, and is refused
        assert cluster.step()
    small = cluster.submit(some_prompt(6, 3), max_tokens=2)
    run_until_output(cluster, small, 2)
    assert (running, 0) not in cluster.finished
    assert not cluster.output(large)
    assert cluster.core.stats.num_preemptions == 0
    cluster.run()
    cluster.assert_idle()


def in_host_memory(cluster: StepCluster) -> int:
    """Two less urgent ones run until one of them is swapped. Which."""
    for first in (1, 2):
        cluster.submit(some_prompt(30, first), max_tokens=40, priority=1)
    while not cluster.core.num_swapped:
        assert cluster.step()
    [swapped] = cluster.core.present()[1]
    return swapped.request.request_no


@pytest.mark.parametrize("priority", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_only_an_urgent_request_goes_before_one_that_is_in_host_memory(priority: int, seed: int) -> None:
    cluster = tight(24, seed=seed, num_host_blocks=40, mode="swap")
    swapped = in_host_memory(cluster)
    late = cluster.submit(some_prompt(6, 3), max_tokens=2, priority=priority)
    [its_sequence] = [one for one in cluster.core.present()[2] if one.request.request_no == late]
    while its_sequence.state is SequenceState.WAITING:
        assert cluster.step()
    waits = (SequenceState.SWAPPING_OUT, SequenceState.SWAPPED)
    still_waiting = [one.request.request_no for one in cluster.core.present()[1] if one.state in waits]
    assert still_waiting == ([swapped] if priority == 0 else [])
    cluster.run()
    for first in (1, 2):
        assert cluster.output(first) == expected_output(some_prompt(30, first), 40, VOCAB)
    cluster.assert_idle()


def test_an_urgent_request_gets_the_whole_pool_while_others_are_in_host_memory() -> None:
    cluster = tight(24, num_host_blocks=40, mode="swap")
    in_host_memory(cluster)
    urgent = cluster.submit(some_prompt(95, 3), max_tokens=1)
    cluster.run()
    assert next(iter(cluster.finished)) == (urgent, 0)
    for first in (1, 2):
        assert cluster.output(first) == expected_output(some_prompt(30, first), 40, VOCAB)
    cluster.assert_idle()


def test_one_that_gives_its_blocks_moves_on_between_two_pauses() -> None:
    """Urgent requests that need most of the pool never cease to come."""
    cluster = tight(20)
    slow = cluster.submit(some_prompt(20, 1), max_tokens=50, priority=1)
    run_until_output(cluster, slow, 1)
    num_urgent = 0
    while (slow, 0) not in cluster.finished:
        if len(cluster.finished) == num_urgent:  # one is always there
            num_urgent += 1
            cluster.submit(some_prompt(60, 1 + num_urgent), max_tokens=2)
        assert cluster.step()
        assert num_urgent < 500
    paused = cluster.core.stats.num_paused["no_blocks"]
    assert 2 <= paused <= 50 // MIN_PROGRESS + 1
    cluster.run()
    assert cluster.output(slow) == expected_output(some_prompt(20, 1), 50, VOCAB)
    cluster.assert_idle()
