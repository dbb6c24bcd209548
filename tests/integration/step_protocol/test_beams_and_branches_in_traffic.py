"""Beam searches, branches and kept answers among ordinary requests, under random orders of delivery."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from octavo.common.messages.generation import FinishReason
from octavo.scheduler.core import CoreSettings
from octavo.scheduler.sequence import choice_seed
from octavo.simulator.beam_reference import beam_answers
from octavo.simulator.faulty_cluster import FaultyCluster
from octavo.simulator.scripted_worker import expected_output, likeliest_tokens
from octavo.simulator.step_cluster import StepCluster

VOCAB = 31
EOS = 13
SALTS = [b"", b"blue"]


@dataclass
class Asked:
    """A request, and what it must be answered with."""

    start: list[int]
    """Prompt with the tokens shared with a branch point."""
    max_tokens: int
    n: int
    salt: bytes
    options: dict[str, Any]
    is_kept: bool
    may_be_unknown: bool = False
    """Its branch point may be gone."""

    def answers(self) -> list[list[int]]:
        if width := self.options.get("beam_width"):
            return beam_answers(
                _logprobs_after,
                self.start,
                self.max_tokens,
                width=width,
                length_penalty=self.options["length_penalty"],
                early_stopping=self.options["early_stopping"],
                ending_ids=frozenset({EOS}),
            )[: self.n]
        return [self._sampled(choice) for choice in range(self.n)]

    def _sampled(self, choice: int) -> list[int]:
        temperature = self.options["temperature"]
        answer = expected_output(self.start, self.max_tokens, VOCAB, choice_seed(7, choice), temperature)
        return answer[: answer.index(EOS) + 1] if EOS in answer else answer


def _logprobs_after(token_ids: Sequence[int]) -> dict[int, float]:
    row = likeliest_tokens(token_ids, VOCAB, VOCAB)
    return dict(zip(row.top_token_ids, row.top_logprobs, strict=True))


class Traffic:
    """Random requests to one cluster, and the check of all answers."""

    def __init__(self, seed: int, cluster_class: type[StepCluster] = StepCluster) -> None:
        self.dice = dice = random.Random(seed)
        self.cluster = cluster_class(
            num_blocks=dice.choice([8, 12, 20, 60]),
            block_size=dice.choice([1, 4, 8]),
            max_num_seqs=dice.choice([1, 3, 5, 8]),
            max_model_len=dice.choice([12, 40]),
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            settings=CoreSettings(
                max_num_batched_tokens=dice.choice([8, 16, 64]),
                max_num_kept=dice.choice([2, 5, 50]),
                pipeline_depth=dice.choice([1, 2, 2, 3]),
                prefix_cache=dice.random() < 0.7,
                credits_per_sequence=dice.choice([1, 2, 4]),
            ),
            seed=seed,
        )
        self.limit = self.cluster.model.max_model_len
        self.asked: dict[int, Asked] = {}
        self.aborted: set[int] = set()
        self.cut: dict[tuple[int, int], int] = {}
        """Choices that were ended by their text, after so many tokens."""

    def submit(self) -> None:
        dice = self.dice
        parent = dice.choice(list(self.asked)) if self.asked and dice.random() < 0.4 else None
        branch, start = None, self._prompt()
        salt = dice.choice(SALTS)
        if parent is not None:
            branch, shared = self._branch_point(parent)
            start = [*shared, *self._prompt()[: dice.choice([0, 0, 1, 5])]]
            salt = self.asked[parent].salt
        if len(start) >= self.limit:
            return
        max_tokens = dice.randrange(1, self.limit - len(start) + 1)
        n, options = self._options()
        is_kept = dice.random() < 0.5
        prompt = start if branch is None else start[len(shared) :]
        request = self.cluster.submit(
            prompt,
            max_tokens,
            n=n,
            branch=branch,
            cache_salt=salt,
            keep_s=dice.choice([0.01, 0.2, 5.0]) if is_kept else 0.0,
            **options,
        )
        self.asked[request] = Asked(start, max_tokens, n, salt, options, is_kept, may_be_unknown=branch is not None)

    def _prompt(self) -> list[int]:
        first = self.dice.randrange(4)
        return [(first + 7 * position) % VOCAB for position in range(self.dice.randrange(1, self.limit))]

    def _branch_point(self, parent: int) -> tuple[tuple[int, int, int | None], list[int]]:
        """A place in a choice, and the tokens up to it as the client knows them."""
        choice = self.dice.randrange(self.asked[parent].n)
        output = self.cluster.output(parent, choice)
        output = output[: self.cut.get((parent, choice), len(output))]
        whole = [*self.asked[parent].start, *output]
        num_tokens = self.dice.choice([None, self.dice.randrange(1, len(whole) + 1)])
        return (parent, choice, num_tokens), whole[:num_tokens]

    def _options(self) -> tuple[int, dict[str, Any]]:
        dice, most = self.dice, self.cluster.model.max_num_seqs
        if dice.random() < 0.4:
            width = dice.randrange(1, min(most, 4) + 1)
            penalty = dice.choice([0.0, 1.0, 1.0, 2.0])
            return dice.randrange(1, width + 1), {
                "beam_width": width,
                "length_penalty": penalty,
                "early_stopping": dice.random() < 0.5,
            }
        return dice.choice([1, 1, 2, 4]), {"temperature": dice.choice([0.0, 1.0]), "seed": 7}

    def disturb(self) -> None:
        dice, cluster = self.dice, self.cluster
        if self.asked and dice.random() < 0.2:
            request = dice.choice(list(self.asked))
            choice = dice.choice([None, 0, 1])
            num_output = len(cluster.output(request, choice or 0))
            if choice is not None and num_output and (request, choice) not in cluster.finished and dice.random() < 0.5:
                num_output = dice.randrange(1, num_output + 1)
                self.cut[request, choice] = num_output
                cluster.abort(request, choice, num_output)
            else:
                cluster.abort(request, choice)
            self.aborted.add(request)
        if self.asked and dice.random() < 0.05:
            request = dice.choice(list(self.asked))
            cluster.forget(request, self.asked[request].salt)
        if isinstance(cluster, FaultyCluster):
            self._break(cluster)
        elif dice.random() < 0.04:
            cluster.crash()
        if dice.random() < 0.1:
            cluster.pass_time(0.1)
        for _ in range(dice.randrange(0, 40)):
            cluster.step()

    def _break(self, cluster: FaultyCluster) -> None:
        faults = [cluster.cut_worker_link, cluster.cut_kv_link, cluster.restart_kvmanager, cluster.restart_worker]
        if self.dice.random() < 0.15:
            self.dice.choice(faults)(absence=self.dice.choice([0, 5, 60]))

    def check(self) -> None:
        cluster = self.cluster
        for request, asked in self.asked.items():
            if request in cluster.failed:
                assert asked.may_be_unknown and cluster.failed[request].reason == "UNKNOWN_RESPONSE"
                continue
            for choice, answer in enumerate(asked.answers()):
                if cluster.finish_reason(request, choice) is FinishReason.ABORT:
                    assert request in self.aborted
                    answer = answer[: len(cluster.output(request, choice))]
                assert cluster.output(request, choice) == answer, (request, choice, asked)
            assert cluster.prompt_tokens.get(request, len(asked.start)) == len(asked.start)


@pytest.mark.parametrize("seed", range(60))
def test_every_answer_is_right_and_nothing_is_left(seed: int) -> None:
    """Aborts at any moment, stops by text, crashes, tiny pools, every depth; kept answers expire in the end."""
    run_traffic(Traffic(seed))


@pytest.mark.parametrize("seed", range(60))
def test_cut_links_and_dead_services_change_no_answer(seed: int) -> None:
    """The same with links that resume, a KV manager that is told all anew, and workers that lose everything."""
    run_traffic(Traffic(seed, FaultyCluster))


def run_traffic(traffic: Traffic) -> None:
    for _ in range(40):
        if traffic.dice.random() < 0.7:
            traffic.submit()
        traffic.disturb()
    traffic.cluster.run()
    traffic.check()
    traffic.cluster.pass_time(10.0)
    traffic.cluster.run()
    traffic.cluster.assert_idle()
