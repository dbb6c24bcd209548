"""The blocks and slots of one worker's life, who runs in them, and how far its steps are."""

from __future__ import annotations

from collections import deque

from octavo.common.errors import MessageGapError
from octavo.common.messages.generation import ModelInfo
from octavo.common.messages.kv import BlockCopy
from octavo.scheduler.block_account import BlockAccount
from octavo.scheduler.decode_rows import DecodeRows
from octavo.scheduler.launcher import LaunchedStep, without_targets
from octavo.scheduler.queues import Slots
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.swapping import Swapping


class StepsInFlight:
    """Three counters tell how far a step is: launched (sent to the worker), acknowledged (its result is here), told
    (the KV manager knows; `BlockAccount` counts that)."""

    def __init__(self) -> None:
        self.last_launched = self.last_acknowledged = 0
        self.barrier = 0
        """A step without rows, with whose result all transfers of an earlier KV manager have ended."""
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> LaunchedStep | None:
        return self._steps[0] if self._steps else None

    def launched(self, step: LaunchedStep) -> None:
        self.last_launched = step.step_id
        self._steps.append(step)

    def acknowledge(self, step_id: int) -> LaunchedStep:
        """The result of this step is here. Raises MessageGapError if it is not the oldest on its way."""
        if not self._steps or step_id != self._steps[0].step_id:
            raise MessageGapError(f"result of step {step_id} was not the next one")
        self.last_acknowledged = step_id
        return self._steps.popleft()

    def raise_barrier(self) -> None:
        """The next step runs no rows."""
        self.barrier = self.last_launched + 1

    def restart_clock(self, now: float) -> None:
        """The time of the steps on their way counts from now."""
        for step in self._steps:
            step.launched_at = now


class WorkerPool:
    """Lives from `SchedulerCore.start` to `pool_lost`, and is thrown away as a whole."""

    def __init__(self, model: ModelInfo, num_blocks: int, highest_generation: int = 0) -> None:
        self.account = BlockAccount(num_blocks, model.block_size, highest_generation)
        self.slots = Slots(model.max_num_seqs)
        self.swapping = Swapping(self.account, self.slots)
        self.steps = StepsInFlight()
        self.decodes = DecodeRows(model.block_size, model.max_num_seqs)
        self.running: dict[int, Sequence] = {}
        """RUNNING and LEAVING sequences, in the order of admission."""
        self._copies: list[BlockCopy] = []

    def run(self, sequence: Sequence) -> None:
        """All its blocks hold what they should."""
        sequence.state = SequenceState.RUNNING
        self.running[sequence.sequence_id] = sequence
        self.decodes.add(sequence)

    def stop(self, sequence: Sequence) -> None:
        """It gets no further row. What becomes of its state, blocks and slot is the caller's business."""
        del self.running[sequence.sequence_id]
        self.decodes.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give up the sequence's blocks, and copies into them that are not made yet."""
        if self._copies:
            self._copies = without_targets(self._copies, sequence.block_table)
        self.account.release(sequence, self.steps.last_launched)

    def copy(self, copy: BlockCopy) -> None:
        """For the next plan, whatever it runs. The source may have a new owner already, but that one comes with the
        same reply or a later one, so its rows are in that plan or a later one, and copies come before rows."""
        self._copies.append(copy)

    def take_copies(self) -> list[BlockCopy]:
        copies, self._copies = self._copies, []
        return copies
