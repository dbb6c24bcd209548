"""Draws clusters and requests: tiny pools, lengths down to one token, prompts with common beginnings."""

from __future__ import annotations

import random
from pathlib import Path

from octavo.common.messages.generation import BranchPoint, SamplingParams, Submit
from octavo.kvmanager.host_tier import HostTierSettings
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.preemption import PreemptionSettings
from octavo.simulator.scripted_gateway import ClientRequest
from octavo.simulator.simulated_cluster import VOCAB_SIZE, ClusterShape

BEAM_RATE = 0.08
KEEP_S = (0.0, 0.0, 0.05, 1.0, 5.0)
SALTS = (b"", b"", b"", b"blue")
WEIGHTS = {b"": 1, b"blue": 3}
"""Of tenants, each of which has a salt of its own."""


def draw_shape(dice: random.Random, folder: Path) -> ClusterShape:
    """`folder` is where the KV manager keeps its catalogue, if it has one."""
    return ClusterShape(
        num_blocks=dice.choice([8, 12, 20, 40, 80]),
        block_size=dice.choice([1, 4, 8]),
        max_num_seqs=dice.choice([1, 2, 5, 8]),
        max_model_len=dice.choice([12, 40, 60]),
        core=CoreSettings(
            max_num_batched_tokens=dice.choice([8, 16, 64]),
            max_num_waiting=10_000,
            pipeline_depth=dice.choice([1, 2, 2, 3]),
            prefix_cache=dice.random() < 0.85,
            credits_per_sequence=dice.choice([1, 2, 4]),
            min_shared_blocks=dice.choice([1, 2, 4]),
            preemption=PreemptionSettings(mode=dice.choice(["auto", "swap", "recompute"])),
            single_flight_timeout_s=dice.choice([0.005, 0.1, 5.0]),
            max_num_kept=dice.choice([2, 5, 50]),
        ),
        num_host_blocks=dice.choice([0, 0, 8, 40]),
        host_tier=HostTierSettings(min_host_hit_blocks=dice.choice([1, 1, 3])),
        duplicate_rate=dice.choice([0.0, 0.02, 0.2]),
        num_gateways=dice.choice([1, 2, 3]),
        ledger_interval=dice.choice([1, 10, 30, 30, 100, 100]),
        catalogue_dir=folder if dice.random() < 0.6 else None,
    )


class Traffic:
    """Requests of one cluster."""

    def __init__(self, dice: random.Random, max_len: int, max_beam_width: int) -> None:
        self._dice = dice
        self._max_len = max_len
        self._max_beam_width = max_beam_width
        self._heads = [_tokens(dice.randrange(1, max_len), first) for first in range(3)]

    def draw(self) -> Submit:
        """A request, whose number is still to be given."""
        prompt = self._prompt()
        params = self._params(self._max_len - len(prompt))
        return self._submit(prompt, params, self._dice.choice(SALTS), None)

    def draw_branch(self, parent: ClientRequest) -> tuple[Submit, tuple[int, ...]] | None:
        """A request that goes on from what a client has got of another one, and the tokens that both share.

        None if these fill the model's length.
        """
        dice = self._dice
        choice_index = dice.randrange(len(parent.choices))
        whole = (*parent.start, *parent.choices[choice_index].tokens)
        shared = whole[: dice.randrange(1, len(whole) + 1)]
        prompt = self._prompt()[: dice.choice([0, 0, 1, 5])]
        num_left = self._max_len - len(shared) - len(prompt)
        if num_left < 1:
            return None
        point = BranchPoint(parent.submit.request_id, choice_index, len(shared))
        return self._submit(prompt, self._params(num_left), parent.submit.cache_salt, point), shared

    def draw_turn(self, before: ClientRequest) -> Submit | None:
        """A request whose prompt goes on from what a client has got of another one, as the next turn of a chat does.

        None if that fills the model's length.
        """
        dice = self._dice
        whole = (*before.start, *dice.choice(before.choices).tokens)
        prompt = whole + _tokens(dice.randrange(0, 4), dice.randrange(50))
        num_left = self._max_len - len(prompt)
        if num_left < 1:
            return None
        return self._submit(prompt, self._params(num_left), before.submit.cache_salt, None)

    def _submit(
        self, prompt: tuple[int, ...], params: SamplingParams, salt: bytes, branch: BranchPoint | None
    ) -> Submit:
        priority, keep_s = self._dice.choice([0, 0, 0, 1, -1]), self._dice.choice(KEEP_S)
        tenant, weight = salt.decode(), WEIGHTS[salt]
        return Submit(0, "", prompt, params, salt, priority, branch, keep_s, tenant=tenant, weight=weight)

    def _prompt(self) -> tuple[int, ...]:
        dice = self._dice
        head = dice.choice(self._heads)
        tail = _tokens(dice.randrange(0, 4), dice.randrange(50))
        return (head[: dice.randrange(1, len(head) + 1)] + tail)[: self._max_len - 1]

    def _params(self, max_output: int) -> SamplingParams:
        dice = self._dice
        max_tokens = dice.randrange(1, max_output + 1)
        if dice.random() < BEAM_RATE:
            width = dice.randrange(1, self._max_beam_width + 1)
            return SamplingParams(
                max_tokens,
                n=dice.randrange(1, width + 1),
                temperature=0.0,
                beam_width=width,
                length_penalty=dice.choice([0.0, 1.0, 1.0, 2.0]),
                early_stopping=dice.random() < 0.5,
            )
        return SamplingParams(
            max_tokens,
            n=dice.choice([1, 1, 1, 2, 5]),
            temperature=dice.choice([0.0, 1.0]),
            seed=dice.randrange(2**64),
            ignore_eos=dice.random() < 0.5,
            stop_token_ids=(dice.randrange(VOCAB_SIZE),) if dice.random() < 0.2 else (),
        )


def _tokens(length: int, first: int) -> tuple[int, ...]:
    return tuple((first + 7 * position) % VOCAB_SIZE for position in range(length))
