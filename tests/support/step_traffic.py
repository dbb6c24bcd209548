"""Requests to a cluster of the step protocol, and the answers that its scripted worker owes them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.common.messages.generation import FinishReason
from octavo.scheduler.sequence import choice_seed
from octavo.simulator.scripted_worker import expected_output
from octavo.simulator.step_cluster import StepCluster

VOCAB = 97
EOS = 13
"""Ends an answer, where the cluster's model has it."""
SEED = 7


def some_prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 7 * position) % VOCAB for position in range(length)]


def greedy(prompt: list[int], num_tokens: int) -> list[int]:
    return expected_output(prompt, num_tokens, VOCAB)


@dataclass(frozen=True)
class _Request:
    prompt: list[int]
    max_tokens: int
    n: int
    temperature: float


class RandomTraffic:
    """Mixed lengths, shared prefixes, choices, and aborts at any moment."""

    def __init__(self, cluster: StepCluster, dice: random.Random, priorities: Sequence[int] = ()) -> None:
        self._cluster, self._dice, self._priorities = cluster, dice, priorities
        self._limit = cluster.model.max_model_len
        self._heads = [some_prompt(dice.randrange(1, self._limit), first=first) for first in range(3)]
        self._submitted: dict[int, _Request] = {}
        self._aborted: set[int] = set()

    def go_on(self) -> None:
        """Perhaps a request more, perhaps an abort of one."""
        cluster, dice = self._cluster, self._dice
        if dice.random() < 0.7:
            head = dice.choice(self._heads)
            head = head[: dice.randrange(1, len(head) + 1)]
            prompt = (head + some_prompt(dice.randrange(0, 4), first=dice.randrange(50)))[: self._limit - 1]
            max_tokens = dice.randrange(1, self._limit - len(prompt) + 1)
            n, temperature = dice.choice([1, 1, 1, 2, 5]), 1.0 if dice.random() < 0.5 else 0.0
            options = {"priority": dice.choice(self._priorities)} if self._priorities else {}
            number = cluster.submit(prompt, max_tokens, n=n, seed=SEED, temperature=temperature, **options)
            self._submitted[number] = _Request(prompt, max_tokens, n, temperature)
        if self._submitted and dice.random() < 0.3:
            number = dice.choice(list(self._submitted))
            self._aborted.add(number)
            cluster.abort(number, dice.choice([None, 0, 1]))

    def assert_exact(self) -> None:
        """Every choice has its tokens, or their beginning if it was aborted, and nothing is left."""
        cluster = self._cluster
        assert cluster.failed == {}
        for number, request in self._submitted.items():
            for choice in range(request.n):
                seed = choice_seed(SEED, choice)
                answer = expected_output(request.prompt, request.max_tokens, VOCAB, seed, request.temperature)
                if EOS in answer:
                    answer = answer[: answer.index(EOS) + 1]
                output = cluster.output(number, choice)
                if cluster.finished[number, choice].reason is FinishReason.ABORT:
                    assert number in self._aborted
                    answer = answer[: len(output)]
                assert output == answer
        cluster.assert_idle()
