"""Chooses the worker group of a prompt. Plain arithmetic: no clock, no link.

The cost of a group is the tokens that would be computed there before the prompt's first one, in units of one prefill
token. A cached prefix lowers it, whatever waits there raises it; so a group that holds a hot prefix is chosen until its
queue costs more than the prefix saves, and then the next one computes the prefix and shares the load. A group that
holds nothing, as one that has just started, has no queue either and gets its share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.common.messages.generation import SchedulerLoad

RoutingPolicy = Literal["prefix", "least_loaded", "round_robin"]

_DECODE_TOKENS = 16
"""What a running sequence costs the prompts beside it: a token of every step."""
_SLOT_TOKENS = 256
"""What waiting for a sequence to end costs, when all slots are taken or the blocks are."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that could serve the prompt."""

    load: SchedulerLoad
    """As its scheduler told last."""
    num_matched_tokens: int
    """Leading tokens of the prompt that it holds."""
    num_open: int
    """Requests of this gateway there."""
    num_waiting_tokens: int
    """What of these is not computed yet and has not begun."""
    block_size: int

    def cost(self, num_tokens: int) -> float:
        """Of a prompt of so many tokens. The scheduler's figures are older, this gateway's are its own only; the
        larger counts."""
        load = self.load
        num_sequences = max(load.num_running + load.num_waiting, self.num_open)
        cost = float(num_tokens - self.num_matched_tokens)
        cost += max(load.num_waiting_tokens, self.num_waiting_tokens)
        cost += _DECODE_TOKENS * num_sequences
        if load.max_num_running:
            cost += _SLOT_TOKENS * max(0, num_sequences + 1 - load.max_num_running)
        if load.num_blocks:
            num_wanted_blocks = (num_tokens - self.num_matched_tokens) // self.block_size + 1
            shortage = max(0, num_wanted_blocks - load.num_available_blocks)
            cost += _SLOT_TOKENS * shortage / max(1, num_wanted_blocks)
        return cost


class Router:
    """Remembers whose turn it is: among equal groups, that of the one that was chosen least recently."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        self._num_choices = 0
        self._chosen_at: dict[str, int] = {}
        """group |-> number of the choice that it was last"""

    def choose(self, num_tokens: int, candidates: Sequence[tuple[str, Candidate]]) -> str:
        """One of the groups, of which there is at least one."""
        self._num_choices += 1
        chosen, _ = min(candidates, key=lambda pair: (self._cost(num_tokens, pair[1]), self._chosen_at.get(pair[0], 0)))
        self._chosen_at[chosen] = self._num_choices
        return chosen

    def forget(self, group: str) -> None:
        """The group is gone."""
        self._chosen_at.pop(group, None)

    def _cost(self, num_tokens: int, candidate: Candidate) -> float:
        if self.policy == "round_robin":
            return 0.0
        if self.policy == "least_loaded":
            load = candidate.load
            return max(load.num_running + load.num_waiting, candidate.num_open)
        return candidate.cost(num_tokens)
