"""Rows whose grammar was not ready are launched again; one that failed ends its request alone."""

from __future__ import annotations

from random import Random

import pytest

from octavo.common.messages.generation import FinishReason
from octavo.common.messages.step import GRAMMAR_FAILED, NOT_READY, RowFlag, StepPlan, StepResult
from octavo.common.messages.token_rules import TokenRules
from octavo.scheduler.core_settings import CoreSettings
from octavo.simulator.scripted_worker import ScriptedWorker
from octavo.simulator.step_cluster import StepCluster

RULES = TokenRules(grammar="any")


class SlowMatcher:
    """Answers for rows of slots with a grammar, now and then, that they are not ready, or have failed."""

    def __init__(self, worker: ScriptedWorker, seed: int, code: int = NOT_READY, share: float = 0.5) -> None:
        self._worker, self._random, self._code, self._share = worker, Random(seed), code, share
        self._has_grammar: dict[int, int] = {}
        self.num_undrawn = 0

    def run(self, plan: StepPlan) -> StepResult:
        for opened in plan.opened_slots:
            self._has_grammar[opened.slot] = len(opened.seeds) if opened.rules is not None else 0
        result = self._worker.run(plan)
        first = 0
        for slot, flags in zip(plan.slots, plan.flags, strict=True):
            if not flags & (RowFlag.SAMPLE | RowFlag.FAN_OUT):
                continue
            count = self._has_grammar[slot] if flags & RowFlag.FAN_OUT and self._has_grammar[slot] else 1
            if self._has_grammar[slot]:
                assert not flags & RowFlag.FED_BY_LAST_SAMPLE
                if self._random.random() < self._share:
                    result.token_ids[first : first + count] = [self._code] * count
                    self.num_undrawn += 1
            first += count
        return result


def cluster_with(seed: int, code: int = NOT_READY, share: float = 0.5) -> tuple[StepCluster, SlowMatcher]:
    cluster = StepCluster(seed=seed, settings=CoreSettings(max_num_batched_tokens=32))
    matcher = SlowMatcher(cluster.worker, seed, code, share)
    cluster.worker = matcher  # type: ignore[assignment]
    return cluster, matcher


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_launched_again_give_the_same_tokens(seed: int) -> None:
    prompts = [list(range(3, 3 + length)) for length in (4, 16, 17, 40)]
    plain = StepCluster(seed=seed, settings=CoreSettings(max_num_batched_tokens=32))
    expected = [plain.submit(prompt, 12, ignore_eos=True, n=n) for prompt in prompts for n in (1, 3)]
    plain.run()
    cluster, matcher = cluster_with(seed)
    asked = [cluster.submit(prompt, 12, ignore_eos=True, n=n, rules=RULES) for prompt in prompts for n in (1, 3)]
    free = cluster.submit(prompts[2], 30, ignore_eos=True)
    cluster.run()

    assert matcher.num_undrawn > 20
    for request_no, plain_no, n in zip(asked, expected, [1, 3] * 4, strict=True):
        for choice in range(n):
            assert cluster.output(request_no, choice) == plain.output(plain_no, choice)
            assert cluster.finish_reason(request_no, choice) is FinishReason.LENGTH
    assert len(cluster.output(free)) == 30
    cluster.assert_idle()


def test_grammar_that_fails_ends_its_request_alone() -> None:
    cluster, _ = cluster_with(1, GRAMMAR_FAILED, share=0.2)
    failing = cluster.submit([3, 4, 5], 100, ignore_eos=True, n=2, rules=RULES)
    free = cluster.submit([3, 4, 6], 20, ignore_eos=True)
    cluster.run()

    assert cluster.failed[failing].reason == "INVALID_GRAMMAR"
    assert "grammar" in cluster.failed[failing].message
    assert len(cluster.output(free)) == 20
    cluster.assert_idle()
