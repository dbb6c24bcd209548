"""Sequences on their way to host memory, in it, and on their way back; and the transfers that move their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from octavo.common.messages.kv import SwappedIn, SwappedOut, Transfer, Verdict
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.policy import goes_before
from octavo.scheduler.queues import Slots, place_in_line
from octavo.scheduler.sequence import Sequence, SequenceState


class Swapping:
    """Holds each of its sequences in one of three places, by state.

    SWAPPING_OUT  asked for, then copied; no slot
    SWAPPED       waits for blocks on the device; no slot
    SWAPPING_IN   has asked for its blocks, or has them and a copy fills them; holds a slot

    A sequence that gets prefix blocks from host memory at its admission is SWAPPING_IN, too.
    """

    def __init__(self, account: BlockAccount, slots: Slots) -> None:
        self._account = account
        self._slots = slots
        self._leaving: dict[int, Sequence] = {}
        self._swapped: dict[int, Sequence] = {}
        self._arriving: dict[int, Sequence] = {}
        self._asked: Sequence | None = None
        """Of the arriving ones, the one whose swap-in is not answered yet."""
        self._allocatable_at_later: int | None = None
        self._transfers: list[Transfer] = []
        """For the next plan."""
        self._num_blocks_open: dict[int, int] = {}
        """Transfers that the worker has not finished -> their size."""
        self._awaited: dict[int, Sequence] = {}
        """Transfers that a sequence waits for."""

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._leaving.values()
        yield from self._swapped.values()
        yield from self._arriving.values()

    @property
    def num_swapped(self) -> int:
        """Sequences that hold host blocks and wait, or will."""
        return len(self._leaving) + len(self._swapped)

    def is_behind(self, first: Sequence) -> bool:
        """Whether the first in line goes before all that hold host blocks and wait, or will."""
        return all(goes_before(first, one) for one in (*self._leaving.values(), *self._swapped.values()))

    @property
    def num_in_transit(self) -> int:
        """Sequences that are being copied, or have asked for it."""
        return len(self._leaving) + len(self._arriving)

    def needs_plan(self, *, is_idle: bool) -> bool:
        """Whether a plan without rows is worth it: there are transfers to send, or the last plan left some open."""
        return bool(self._transfers) or (is_idle and bool(self._num_blocks_open))

    @property
    def has_transfers(self) -> bool:
        """Some are to be sent or not finished."""
        return bool(self._num_blocks_open)

    @property
    def swapped(self) -> list[Sequence]:
        """SWAPPED sequences, the one that goes first in front."""
        return sorted(self._swapped.values(), key=place_in_line)

    @property
    def arriving(self) -> Iterable[Sequence]:
        return self._arriving.values()

    @property
    def partial(self) -> Sequence | None:
        """The SWAPPED sequence that keeps blocks on the device; there is at most one."""
        return next((sequence for sequence in self._swapped.values() if sequence.block_table), None)

    # Out.

    def swap_out(self, sequence: Sequence, num_kept_blocks: int, last_step: int, now: float) -> None:
        """Ask for it. The sequence has no step in flight, and gives up its slot if it has one."""
        self._account.swap_out(sequence, num_kept_blocks, last_step)
        self._swapped.pop(sequence.sequence_id, None)
        if sequence.slot >= 0:
            self._slots.give_back(sequence.slot, sequence.is_open)
        sequence.leave_device(num_kept_blocks, now)
        self._leaving[sequence.sequence_id] = sequence

    def on_swapped_out(self, answer: SwappedOut) -> Sequence | None:
        """The sequence, if host memory has no room for it: it has left, and has to be released."""
        sequence = self._leaving.get(answer.sequence_id)
        if sequence is None:
            return None
        if answer.verdict is not Verdict.OK:
            del self._leaving[answer.sequence_id]
            return sequence
        if answer.transfer_id:
            self._awaited[answer.transfer_id] = sequence
        else:
            self._park(sequence)
        return None

    def _park(self, sequence: Sequence) -> None:
        del self._leaving[sequence.sequence_id]
        sequence.state = SequenceState.SWAPPED
        self._swapped[sequence.sequence_id] = sequence

    # In.

    def ask_next(self, *, holds_nothing: bool) -> None:
        """Ask for the blocks of the SWAPPED sequence that goes first, if a slot is free and they may be there."""
        if self._asked is not None or not self._swapped or not self._slots.num_free:
            return
        if self._allocatable_at_later is not None and not (
            self._account.may_fit_now(self._allocatable_at_later) or (holds_nothing and self._account.is_settled)
        ):
            return
        self._allocatable_at_later = None
        sequence = self.swapped[0]
        del self._swapped[sequence.sequence_id]
        sequence.state = SequenceState.SWAPPING_IN
        sequence.slot = self._slots.take()
        self._arriving[sequence.sequence_id] = sequence
        self._asked = sequence
        self._account.swap_in(sequence)

    def on_swapped_in(self, answer: SwappedIn) -> Sequence | None:
        """The sequence, if it may run or has to be dropped at once; an aborted one has left."""
        sequence, self._asked = self._asked, None
        assert sequence is not None
        if answer.verdict is not Verdict.OK:
            self._allocatable_at_later = self._account.counts.allocatable
            self._slots.give_back(sequence.slot, is_open=False)
            sequence.slot = -1
            del self._arriving[sequence.sequence_id]
            if sequence.is_aborted:
                return sequence
            sequence.state = SequenceState.SWAPPED
            self._swapped[sequence.sequence_id] = sequence
            return None
        sequence.return_to_device(answer.block_ids, answer.generations)
        if sequence.is_aborted or not answer.transfer_id:
            del self._arriving[sequence.sequence_id]
            return sequence
        self._awaited[answer.transfer_id] = sequence
        return None

    def await_prefix(self, sequence: Sequence, transfer_id: int) -> None:
        """An admitted sequence has to wait until its prefix blocks are filled."""
        sequence.state = SequenceState.SWAPPING_IN
        self._arriving[sequence.sequence_id] = sequence
        self._awaited[transfer_id] = sequence

    # Transfers.

    def send(self, transfers: Iterable[Transfer]) -> None:
        """They go into the next plan, whatever it runs."""
        for transfer in transfers:
            self._transfers.append(transfer)
            self._num_blocks_open[transfer.transfer_id] = len(transfer.device_ids)

    def take_transfers(self) -> list[Transfer]:
        transfers, self._transfers = self._transfers, []
        return transfers

    def on_finished(self, transfer_ids: Iterable[int]) -> tuple[list[Sequence], int]:
        """Sequences that may run now, and how many blocks were copied. Transfers that are not open are ignored."""
        ready: list[Sequence] = []
        num_blocks = 0
        for transfer_id in transfer_ids:
            size = self._num_blocks_open.pop(transfer_id, 0)
            if not size:
                continue
            num_blocks += size
            self._account.finish_transfer(transfer_id)
            sequence = self._awaited.pop(transfer_id, None)
            if sequence is None:
                continue
            if sequence.sequence_id in self._leaving:
                self._park(sequence)
            elif self._arriving.pop(sequence.sequence_id, None):
                ready.append(sequence)
        return ready, num_blocks

    # Leaving for good.

    def drop(self, sequence: Sequence) -> bool:
        """Let go of a sequence that is to be released. False: its swap-in must be answered first."""
        if sequence is self._asked:
            sequence.is_aborted = True
            return False
        for place in (self._leaving, self._swapped, self._arriving):
            place.pop(sequence.sequence_id, None)
        for transfer_id in [key for key, awaiting in self._awaited.items() if awaiting is sequence]:
            del self._awaited[transfer_id]
        if sequence.slot >= 0:
            self._slots.give_back(sequence.slot, is_open=False)
        return True

    def forget(self) -> bool:
        """Everything, without a word to the KV manager. Whether the worker is still at transfers."""
        is_at_work = len(self._num_blocks_open) > len(self._transfers)
        for place in (self._leaving, self._swapped, self._arriving):
            place.clear()
        self._asked = self._allocatable_at_later = None
        self._transfers, self._num_blocks_open, self._awaited = [], {}, {}
        return is_at_work

    def overdue(self, before: float) -> list[Sequence]:
        """SWAPPED sequences that left the device before that time."""
        return [sequence for sequence in self._swapped.values() if sequence.left_at < before]
