"""Blocks that the scheduler may use again by itself while no KV manager is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from octavo.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """What a sequence got as credits and gave up with its table."""

    told_in: int
    """Number of the message that tells of it."""
    last_step: int
    """Its acknowledgement is the fence of the blocks."""
    blocks: list[tuple[int, int]]
    """(block_id, generation)"""
    given_ids: list[int]
    """Blocks of the table that were not got as credits."""


class Recycler:
    """Knows the blocks of tables that were given up, until the KV manager has said that it has them.

    Blocks that a sequence was given with its admission or fork are left alone: they are the prompts that others find.
    """

    def __init__(self) -> None:
        self._given_up: deque[_GivenUp] = deque()
        self.recycled: dict[int, int] = {}
        """block_id -> generation, of all blocks recycled that the KV manager has not taken note of."""

    def note(self, sequence: Sequence, last_step: int, told_in: int) -> None:
        """The sequence gives up its table."""
        first = sequence.num_given_blocks
        blocks = list(zip(sequence.block_table[first:], sequence.generations[first:], strict=True))
        if blocks or first:
            self._given_up.append(_GivenUp(told_in, last_step, blocks, sequence.block_table[:first]))

    def taken_back(self, message_no: int) -> None:
        """The KV manager has answered this message: what it told of is the manager's again.

        Blocks are recycled while no manager is there, and the next one answers only what follows a declaration.
        """
        self.recycled.clear()
        while self._given_up and self._given_up[0].told_in <= message_no:
            self._given_up.popleft()

    def forget(self) -> None:
        """The manager was told all there is."""
        self._given_up.clear()

    def recycle(
        self, acknowledged_step: int, running: Iterable[Sequence], credit_ids: Collection[int]
    ) -> list[tuple[int, int]]:
        """Credits made of blocks whose fence is open and that nobody holds, each under a new generation."""
        if not self._given_up or self._given_up[0].last_step > acknowledged_step:
            return []
        held = {block_id for sequence in running for block_id in sequence.block_table}
        held.update(credit_ids)
        ready = []
        while self._given_up and self._given_up[0].last_step <= acknowledged_step:
            ready.append(self._given_up.popleft())
        for closed in self._given_up:
            held.update(closed.given_ids, (block_id for block_id, _ in closed.blocks))
        made = []
        for given_up in ready:
            for block_id, generation in given_up.blocks:
                if block_id not in held and self.recycled.get(block_id, generation) == generation:
                    held.add(block_id)
                    self.recycled[block_id] = generation + 1
                    made.append((block_id, generation + 1))
        return made
