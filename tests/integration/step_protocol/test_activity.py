"""What operators see of a scheduler at work, with the real KV manager."""

from __future__ import annotations

import pytest

from octavo.common.codecs.arrays import unpack_float64, unpack_int32, unpack_int64
from octavo.scheduler.activity import MAX_STEPS, ActivityWatch
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import some_prompt


def test_sequences_are_named_once_and_steps_are_told_once() -> None:
    cluster = StepCluster()
    cluster.submit(some_prompt(18), max_tokens=4)
    cluster.submit(some_prompt(9, first=3), max_tokens=2)
    watch = ActivityWatch(cluster.core)
    before = watch.look(cluster.now)
    assert list(before.states) == [1, 1]
    assert [before.wait_causes[number] for number in before.waits_for] == ["kv_answer", "kv_answer"]
    assert {name.request_id for name in before.names} == {"request-1", "request-2"}
    cluster.run()
    after = watch.look(cluster.now)
    assert (list(after.names), after.states, after.num_running, after.num_waiting) == ([], b"", 0, 0)
    step_ids = unpack_int64(after.step_ids)
    assert step_ids == list(range(1, len(step_ids) + 1))
    assert sum(unpack_int32(after.step_prefill_tokens)) == 18 + 9
    assert max(unpack_int32(after.step_rows)) == 2
    assert all(unpack_int32(after.step_rows))
    launched, ended = unpack_float64(after.step_launched_s), unpack_float64(after.step_ended_s)
    assert all(begin <= end <= cluster.now for begin, end in zip(launched, ended, strict=True))
    assert {request.request_id: request.num_output_tokens for request in after.ended} == {
        "request-1": 4,
        "request-2": 2,
    }
    assert not any(request.is_failed for request in after.ended)
    assert all(0 <= request.ttft_s <= request.ended_s for request in after.ended)
    assert after.num_output_tokens == 6
    again = watch.look(cluster.now)
    assert (again.step_ids, list(again.ended), again.num_unlisted) == (b"", [], 0)


def test_a_watcher_that_comes_late_gets_the_last_steps_only() -> None:
    cluster = StepCluster()
    for first in range(30):
        cluster.submit(some_prompt(5, first), max_tokens=25)
        cluster.run()
    num_steps = cluster.core.stats.num_steps
    assert num_steps > MAX_STEPS
    late = ActivityWatch(cluster.core).look(cluster.now)
    told = unpack_int64(late.step_ids)
    assert (len(told), told[-1], late.num_unlisted) == (MAX_STEPS, num_steps, 0)


def test_what_a_watcher_was_too_slow_for_is_counted() -> None:
    cluster = StepCluster()
    watch = ActivityWatch(cluster.core)
    cluster.submit(some_prompt(5), max_tokens=2)
    cluster.run()
    watch.look(cluster.now)
    seen = cluster.core.stats.num_steps
    for first in range(30):
        cluster.submit(some_prompt(5, first), max_tokens=25)
        cluster.run()
    frame = watch.look(cluster.now)
    assert len(unpack_int64(frame.step_ids)) == MAX_STEPS
    assert frame.num_unlisted == cluster.core.stats.num_steps - seen - MAX_STEPS


@pytest.mark.parametrize("num_choices", [1, 3])
def test_output_tokens_of_all_choices_count(num_choices: int) -> None:
    cluster = StepCluster()
    cluster.submit(some_prompt(18), max_tokens=5, n=num_choices)
    cluster.run()
    [ended] = ActivityWatch(cluster.core).look(cluster.now).ended
    assert (ended.num_output_tokens, ended.num_choices) == (5 * num_choices, num_choices)


def test_lengths_are_those_of_the_moment() -> None:
    cluster = StepCluster()
    request_no = cluster.submit(some_prompt(18), max_tokens=40)
    watch = ActivityWatch(cluster.core)
    seen = []
    while cluster.core.num_requests:
        cluster.step()
        frame = watch.look(cluster.now)
        if frame.num_running:
            [num_tokens], [num_computed] = unpack_int32(frame.num_tokens), unpack_int32(frame.num_computed_tokens)
            [sequence] = cluster.core.present()[0]
            assert (num_tokens, num_computed) == (len(sequence.token_ids), sequence.num_computed_tokens)
            seen.append(num_tokens)
    assert seen == sorted(seen)
    assert seen[-1] == 18 + len(cluster.output(request_no)) - 1
    assert len(set(seen)) == 40
