"""Owns the rows of sequences that only decode: what a step costs depends on what changes, not on how many there are."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.common.messages.step import RowFlag, StepPlan
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.sequence import Sequence, SequenceState

_FLAGS = RowFlag.SAMPLE | RowFlag.FED_BY_LAST_SAMPLE

_SLOT, _BASE, _ENTERED, _LAST, GATEWAY, REQUEST, CHOICE = range(7)
"""Columns of a row: slot; next position less the number of launches; the first launch that it was in; the launch
after which it must leave; names of gateway, request and choice."""

Columns = NDArray[np.int64]
"""`int64 [7, rows]`."""


@dataclass(slots=True)
class LaunchedDecodes:
    """The rows of one step as they were at its launch. Row i has the step's sample i."""

    launch_no: int
    columns: Columns
    gone: dict[int, Sequence] = field(default_factory=dict)
    """Rows whose sequences have left since."""

    def __len__(self) -> int:
        return len(self.columns[_SLOT])

    def end(self, row: int) -> int:
        """Position below which all is computed once the step is done."""
        return int(self.columns[_BASE, row]) + self.launch_no + 1


class DecodeRows:
    """Running sequences that take one position in every step, each fed by the sample of its last row.

    A sequence enters when a row that samples is launched, and leaves when it is stopped or preempted, finds no block,
    or has launched its last row. In here it is not touched by a step unless it fills a block or ends: `settle` gives it
    the tokens that have come since. Its `num_launched_tokens`, `num_pending_samples` and `num_steps_in_flight` stand
    still until it leaves.
    """

    def __init__(self, block_size: int, num_slots: int) -> None:
        self.others: dict[int, Sequence] = {}
        """RUNNING and LEAVING sequences that are not in here, by id."""
        self._block_size = block_size
        self.num_arrived = 0
        """Launches whose tokens are here."""
        self._num_launches = 0
        self._num_rows = 0
        self._all_columns: Columns = np.zeros((7, num_slots), np.int64)
        self._by_slot: list[Sequence | None] = [None] * num_slots
        self._tokens = np.zeros((block_size, num_slots), np.int64)
        """What arrived, by launch modulo the block size and by slot: so many, since each block that fills settles."""
        self._ending_ids: Counter[int] = Counter()
        """Tokens that end any of them, with the number of those that they end."""
        self._launched: deque[LaunchedDecodes] = deque()
        """On their way to the worker and back."""

    def __len__(self) -> int:
        return self._num_rows

    @property
    def _columns(self) -> Columns:
        return self._all_columns[:, : self._num_rows]

    @property
    def ending_ids(self) -> KeysView[int]:
        """Tokens that end at least one of the sequences."""
        return self._ending_ids.keys()

    def _sequences(self, slots: Iterable[int]) -> list[Sequence]:
        return [sequence for slot in slots if (sequence := self._by_slot[slot]) is not None]

    # Who is in here.

    def add(self, sequence: Sequence) -> None:
        """It runs from now on."""
        self.others[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It runs no more."""
        self.leave(sequence)
        del self.others[sequence.sequence_id]

    def enter_if_steady(self, sequence: Sequence) -> None:
        """Take in a sequence, a row of which was launched, if from now on each of its rows follows from the last."""
        request = sequence.request
        if (
            sequence.num_pending_samples
            and sequence.num_tokens_to_launch == 1
            and sequence.num_launched_tokens + 1 < request.max_len
            and request.has_fanned_out
            and not sequence.is_host_fed
            and request.params.num_logprobs is None
            and sequence.state is SequenceState.RUNNING
        ):
            self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        request, launch_no = sequence.request, self._num_launches
        base = sequence.num_launched_tokens - launch_no
        last = request.max_len - 2 - base
        row = self._num_rows
        self._num_rows += 1
        names = (request.gateway_id, request.request_no, sequence.choice_index)
        self._all_columns[:, row] = (sequence.slot, base, launch_no, last, *names)
        self._by_slot[sequence.slot] = sequence
        self._ending_ids.update(request.ending_ids)
        sequence.decodes, sequence.row, sequence.num_settled_launches = self, row, launch_no
        del self.others[sequence.sequence_id]

    def leave(self, sequence: Sequence) -> None:
        """Its rows are planned one by one again, if it runs on. Nothing happens if it is not in here."""
        if sequence.decodes is None:
            return
        self.settle(sequence)
        row, slot = sequence.row, sequence.slot
        _, base, entered, *_ = self._all_columns[:, row].tolist()
        sequence.decodes = None
        sequence.num_launched_tokens = base + self._num_launches
        for launched in self._launched:
            if launched.launch_no >= entered:
                launched.gone[int((launched.columns[_SLOT] == slot).argmax())] = sequence
                sequence.num_pending_samples += 1
                sequence.num_steps_in_flight += 1
        self._num_rows -= 1
        if row < self._num_rows:
            self._all_columns[:, row] = self._all_columns[:, self._num_rows]
            [moved] = self._sequences([int(self._all_columns[_SLOT, row])])
            moved.row = row
        self._by_slot[slot] = None
        for token_id in sequence.request.ending_ids:
            self._ending_ids[token_id] -= 1
            if not self._ending_ids[token_id]:
                del self._ending_ids[token_id]
        self.others[sequence.sequence_id] = sequence

    def disband(self) -> None:
        """All leave."""
        for sequence in self._sequences(self._columns[_SLOT].tolist()):
            self.leave(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Give it the tokens that have come for it."""
        arrived = range(sequence.num_settled_launches, self.num_arrived)
        if arrived:
            places = [launch_no % self._block_size for launch_no in arrived]
            sequence.take_tokens(self._tokens[places, sequence.slot].tolist(), self.num_arrived)

    # Their rows.

    def _beginning_a_block(self) -> list[Sequence]:
        """Whose next position is the first of a block."""
        is_first = (self._columns[_BASE] + self._num_launches) % self._block_size == 0
        return self._sequences(self._columns[_SLOT, is_first].tolist())

    def find_blocks(self, account: BlockAccount) -> None:
        """Spend credits for those that begin a block. Whoever gets none leaves."""
        for sequence in self._beginning_a_block():
            position = int(self._all_columns[_BASE, sequence.row]) + self._num_launches
            if not account.has_block_for(sequence, position):
                self.leave(sequence)

    def grown(self) -> list[Sequence]:
        """Those with blocks that the worker does not know."""
        return [one for one in self._beginning_a_block() if one.num_sent_blocks < len(one.block_table)]

    def launch(self, plan: StepPlan) -> LaunchedDecodes:
        """Put the next row of each into the plan; `find_blocks` has found blocks for all."""
        launched = LaunchedDecodes(self._num_launches, self._columns.copy())
        columns, num_rows = launched.columns, self._num_rows
        plan.slots.extend(columns[_SLOT].tolist())
        plan.starts.extend((columns[_BASE] + self._num_launches).tolist())
        plan.lengths.extend([1] * num_rows)
        plan.flags.extend([_FLAGS] * num_rows)
        self._launched.append(launched)
        self._num_launches += 1
        return launched

    def end_launch(self) -> None:
        """To be called after a launch: those leave that have launched their last row."""
        is_last = self._columns[_LAST] < self._num_launches
        for sequence in self._sequences(self._columns[_SLOT, is_last].tolist()):
            self.leave(sequence)

    # Their tokens.

    def leave_where(self, rows: LaunchedDecodes, token_ids: list[int], token_id: int) -> None:
        """Those leave that this token has come for, if they are still in here."""
        slots = rows.columns[_SLOT].tolist()
        for row, (slot, arrived) in enumerate(zip(slots, token_ids, strict=True)):
            if arrived == token_id and row not in rows.gone:
                self.leave(self._sequences([slot])[0])

    def take(self, rows: LaunchedDecodes, token_ids: list[int]) -> tuple[Columns, list[int]]:
        """The samples of the oldest launch. Returns the rows that are not gone, and their tokens."""
        self._launched.popleft()
        columns, arrived = rows.columns, np.array(token_ids, np.int64)
        if rows.gone:
            is_here = np.ones(len(rows), bool)
            is_here[list(rows.gone)] = False
            columns, arrived = columns[:, is_here], arrived[is_here]
            token_ids = arrived.tolist()
        self._tokens[rows.launch_no % self._block_size, columns[_SLOT]] = arrived
        self.num_arrived = rows.launch_no + 1
        return columns, token_ids

    def settle_full(self) -> list[Sequence]:
        """Settle those whose last row was the last of a block. Returns them."""
        num_arrived, block_size = self.num_arrived, self._block_size
        is_full = (self._columns[_BASE] + num_arrived) % block_size == 0
        slots = self._columns[_SLOT, is_full]
        oldest_first = np.arange(num_arrived - block_size, num_arrived) % block_size
        tokens = self._tokens[oldest_first[:, None], slots].T.tolist()
        sequences = self._sequences(slots.tolist())
        for sequence, last_tokens in zip(sequences, tokens, strict=True):
            num_unsettled = num_arrived - sequence.num_settled_launches
            if num_unsettled > 0:
                sequence.take_tokens(last_tokens[block_size - num_unsettled :], num_arrived)
        return sequences

    def ended(self, columns: Columns, token_ids: list[int]) -> list[Sequence]:
        """Those, of the rows that `take` returned, that their token ends."""
        if self.ending_ids.isdisjoint(token_ids):
            return []
        rows = [row for row, token_id in enumerate(token_ids) if token_id in self._ending_ids]
        sequences = self._sequences(columns[_SLOT, rows].tolist())
        return [
            sequence
            for sequence, row in zip(sequences, rows, strict=True)
            if token_ids[row] in sequence.request.ending_ids
        ]
