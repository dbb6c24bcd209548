"""Draws clusters and requests: tiny pools, lengths down to one token, prompts with common beginnings."""

from __future__ import annotations

import random
from pathlib import Path

from octavo.common.messages.generation import SamplingParams, Submit
from octavo.scheduler.core import CoreSettings
from octavo.simulator.simulated_cluster import ClusterShape

VOCAB_SIZE = 97


def draw_shape(dice: random.Random, folder: Path) -> ClusterShape:
    """`folder` is where the KV manager keeps its catalogue, if it has one."""
    return ClusterShape(
        num_blocks=dice.choice([12, 20, 40, 80]),
        block_size=dice.choice([1, 4, 8]),
        max_num_seqs=dice.choice([1, 2, 5, 8]),
        max_model_len=dice.choice([12, 60]),
        core=CoreSettings(
            max_num_batched_tokens=dice.choice([8, 16, 64]),
            max_num_waiting=10_000,
            pipeline_depth=dice.choice([1, 2, 2, 3]),
            prefix_cache=dice.random() < 0.85,
            credits_per_sequence=dice.choice([1, 2, 4]),
            min_shared_blocks=dice.choice([1, 2, 4]),
        ),
        duplicate_rate=dice.choice([0.0, 0.02, 0.2]),
        num_gateways=dice.choice([1, 2, 3]),
        ledger_interval=dice.choice([1, 10, 30, 100]),
        catalogue_dir=folder if dice.random() < 0.6 else None,
    )


class Traffic:
    """Requests of one cluster."""

    def __init__(self, dice: random.Random, max_len: int) -> None:
        self._dice = dice
        self._max_len = max_len
        self._heads = [_tokens(dice.randrange(1, max_len), first) for first in range(3)]

    def draw(self) -> Submit:
        """A request, whose number is still to be given."""
        dice = self._dice
        head = dice.choice(self._heads)
        tail = _tokens(dice.randrange(0, 4), dice.randrange(50))
        prompt = (head[: dice.randrange(1, len(head) + 1)] + tail)[: self._max_len - 1]
        params = SamplingParams(
            max_tokens=dice.randrange(1, self._max_len - len(prompt) + 1),
            n=dice.choice([1, 1, 1, 2, 5]),
            temperature=dice.choice([0.0, 1.0]),
            seed=dice.randrange(2**64),
            ignore_eos=dice.random() < 0.3,
            stop_token_ids=(dice.randrange(VOCAB_SIZE),) if dice.random() < 0.2 else (),
        )
        salt = dice.choice([b"", b"", b"", b"blue"])
        return Submit(0, "", prompt, params, salt, priority=dice.choice([0, 0, 0, 1, -1]))


def _tokens(length: int, first: int) -> tuple[int, ...]:
    return tuple((first + 7 * position) % VOCAB_SIZE for position in range(length))
