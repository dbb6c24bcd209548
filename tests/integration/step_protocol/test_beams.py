"""Beam search over the real cores with a scripted worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from octavo.common.messages.generation import FinishReason
from octavo.scheduler.core_settings import CoreSettings
from octavo.simulator.beam_reference import beam_answers
from octavo.simulator.scripted_worker import expected_output, likeliest_tokens
from octavo.simulator.step_cluster import StepCluster
from support.step_traffic import VOCAB, some_prompt


def logprobs_after(token_ids: Sequence[int]) -> dict[int, float]:
    """All that the scripted worker would tell."""
    row = likeliest_tokens(token_ids, VOCAB, VOCAB)
    return dict(zip(row.top_token_ids, row.top_logprobs, strict=True))


def expected_answers(prompt: list[int], max_tokens: int, eos: tuple[int, ...] = (), **options: Any) -> list[list[int]]:
    return beam_answers(logprobs_after, prompt, max_tokens, ending_ids=frozenset(eos), **options)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 4, 17, 33])
def test_the_answers_are_those_of_a_plain_search(width: int, length: int) -> None:
    prompt = some_prompt(length)
    cluster = StepCluster(eos_token_ids=(3,), settings=CoreSettings(max_num_batched_tokens=16))
    request = cluster.submit(prompt, max_tokens=12, n=width, beam_width=width)
    cluster.run()
    expected = expected_answers(prompt, 12, (3,), width=width)
    assert [cluster.output(request, choice) for choice in range(width)] == expected
    for choice, answer in enumerate(expected):
        reason = FinishReason.STOP if answer[-1] == 3 else FinishReason.LENGTH
        assert cluster.finish_reason(request, choice) is reason
    cluster.assert_idle()


def test_fewer_answers_than_beams_are_the_best_ones() -> None:
    cluster = StepCluster()
    request = cluster.submit(some_prompt(9), max_tokens=8, n=2, beam_width=4)
    cluster.run()
    best = expected_answers(some_prompt(9), 8, width=4)[:2]
    assert [cluster.output(request, choice) for choice in (0, 1)] == best
    assert (request, 2) not in cluster.finished


def test_penalty_and_early_stopping_reach_the_search() -> None:
    prompt = some_prompt(6)
    for options in ({"length_penalty": -2.0}, {"length_penalty": 2.0}, {"early_stopping": True}):
        cluster = StepCluster(eos_token_ids=(0, 1, 2))
        request = cluster.submit(prompt, max_tokens=20, n=3, beam_width=3, **options)
        cluster.run()
        expected = expected_answers(prompt, 20, (0, 1, 2), width=3, **options)
        assert [cluster.output(request, choice) for choice in range(3)] == expected


def test_beams_share_the_blocks_of_their_prompt() -> None:
    cluster = StepCluster(num_blocks=200)
    cluster.submit(some_prompt(80), max_tokens=10, n=4, beam_width=4)
    most_active = 0
    while cluster.step():
        most_active = max(most_active, cluster.pool.blocks.counts().active)
    assert most_active <= 20 + 4 * 3 + 3  # the prompt once, each beam's own end, and those not yet released


def test_a_search_of_one_beam_does_not_slow_the_others_down() -> None:
    cluster = StepCluster()
    sampled = cluster.submit(some_prompt(5), max_tokens=40)
    beams = cluster.submit(some_prompt(5), max_tokens=40, beam_width=2)
    while (sampled, 0) not in cluster.finished:
        cluster.step()
    assert cluster.output(beams) == []
    cluster.run()
    assert cluster.output(sampled) == expected_output(some_prompt(5), 40, VOCAB)


def test_an_aborted_search_leaves_nothing() -> None:
    for num_messages in range(0, 120, 3):
        cluster = StepCluster(num_blocks=30, seed=num_messages)
        request = cluster.submit(some_prompt(20), max_tokens=30, n=2, beam_width=4)
        for _ in range(num_messages):
            cluster.step()
        cluster.abort(request)
        cluster.run()
        assert cluster.finish_reason(request) is FinishReason.ABORT
        cluster.assert_idle()


def test_one_aborted_answer_leaves_the_others() -> None:
    cluster = StepCluster()
    request = cluster.submit(some_prompt(5), max_tokens=6, n=3, beam_width=3)
    cluster.abort(request, 1)
    cluster.run()
    answers = expected_answers(some_prompt(5), 6, width=3)
    assert cluster.output(request, 0) == answers[0]
    assert cluster.output(request, 1) == []
    assert cluster.output(request, 2) == answers[2]
    cluster.assert_idle()


@pytest.mark.parametrize("num_blocks", [8, 10, 14])
def test_a_pool_too_small_for_all_beams_at_once_still_serves_the_search(num_blocks: int) -> None:
    """Eight beams of up to 8 blocks each of their own tail, in a pool that holds one or two of them."""
    for seed in range(5):
        cluster = StepCluster(num_blocks=num_blocks, max_num_seqs=8, max_model_len=32, seed=seed)
        request = cluster.submit(some_prompt(6), max_tokens=26, n=8, beam_width=8)
        cluster.run()
        assert cluster.failed == {}
        expected = expected_answers(some_prompt(6), 26, width=8)
        assert [cluster.output(request, choice) for choice in range(8)] == expected
        assert cluster.core.stats.num_preemptions > 0
        cluster.assert_idle()


def test_two_searches_that_cannot_hold_their_beams_together_both_end() -> None:
    for seed in range(10):
        cluster = StepCluster(num_blocks=12, max_num_seqs=4, max_model_len=40, seed=seed)
        requests = [cluster.submit(some_prompt(7, first), max_tokens=20, n=4, beam_width=4) for first in range(3)]
        cluster.run()
        for first, request in enumerate(requests):
            expected = expected_answers(some_prompt(7, first), 20, width=4)
            assert [cluster.output(request, choice) for choice in range(4)] == expected
        cluster.assert_idle()


def test_a_lost_pool_costs_a_search_no_answer() -> None:
    cluster = StepCluster(num_blocks=60)
    request = cluster.submit(some_prompt(19), max_tokens=25, n=4, beam_width=4)
    for _ in range(6):
        for _ in range(40):
            cluster.step()
        cluster.crash()
    cluster.run()
    expected = expected_answers(some_prompt(19), 25, width=4)
    assert [cluster.output(request, choice) for choice in range(4)] == expected
    cluster.assert_idle()


def test_searches_that_cannot_be_served_are_refused() -> None:
    cluster = StepCluster(max_num_seqs=4)
    too_wide = cluster.submit([1, 2], max_tokens=3, beam_width=5)
    too_many = cluster.submit([1, 2], max_tokens=3, n=3, beam_width=2)
    sampled = cluster.submit([1, 2], max_tokens=3, beam_width=2, temperature=0.5)
    penalised = cluster.submit([1, 2], max_tokens=3, beam_width=2, length_penalty=1e9)
    cluster.run()
    assert {request: failure.reason for request, failure in cluster.failed.items()} == dict.fromkeys(
        (too_wide, too_many, sampled, penalised), "INVALID_REQUEST"
    )
    assert "at most 4" in cluster.failed[too_wide].message
