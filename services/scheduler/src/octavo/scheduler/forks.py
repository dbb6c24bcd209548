"""Sequences that ask to share another's blocks: choices after the fan-out, beams and branches."""

from __future__ import annotations

from collections.abc import Collection

from octavo.common.messages.kv import Forked, Verdict
from octavo.scheduler.places import Places
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.request_records import WaitCause
from octavo.scheduler.requests import Requests
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.worker_pool import WorkerPool

_HOLDS_BLOCKS = (SequenceState.RUNNING, SequenceState.LEAVING, SequenceState.KEPT)


class Forks:
    """Owns the FORKING sequences, each of which waits for the KV manager's answer."""

    def __init__(
        self, pool: WorkerPool, places: Places, requests: Requests, log: RequestLog, stats: SchedulerStats
    ) -> None:
        self._pool = pool
        self._places = places
        self._requests = requests
        self._log = log
        self._stats = stats
        self._forking: dict[int, Sequence] = {}

    @property
    def asking(self) -> Collection[Sequence]:
        return self._forking.values()

    def fork_or_queue(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """A child shares its parent's first `num_tokens` positions if the parent holds blocks and a slot is free.

        Else it waits like a preempted sequence.
        """
        if num_tokens < 1 or parent.state not in _HOLDS_BLOCKS or not self._pool.slots.num_free:
            self._places.enqueue(child)
            return
        self._log.waits(child, WaitCause.KV_ANSWER)
        child.slot = self._pool.slots.take()
        child.state = SequenceState.FORKING
        self._forking[child.sequence_id] = child
        self._pool.account.fork(parent, child, num_tokens)

    def on_forked(self, forked: Forked) -> None:
        if forked.verdict is not Verdict.OK:
            self._places.let_go_kept(1)
            self._on_refused(forked.child_id)
            return
        child = self._forking.pop(forked.child_id)
        self._stats.num_forks += 1
        child.take_table(forked.block_ids, forked.generations, child.num_shared_tokens)
        if forked.copy is not None:
            self._pool.copy(forked.copy)
        self._pool.run(child)
        if child.is_aborted:
            self._places.leave(child, SequenceState.FINISHED)
        else:
            self._log.runs(child)
            self._requests.note_start(child.request, child.num_shared_tokens)

    def _on_refused(self, child_id: int) -> None:
        child = self._forking.pop(child_id)
        self._log.waits(child, WaitCause.NO_BLOCKS)
        self._places.back_to_queue(child)

    # A KV manager that knows nothing.

    def give_up_without_parent(self, holders: dict[int, Sequence]) -> None:
        """Of the forks that are not answered, leave those that can be asked anew."""
        open_forks = self._pool.account.open_forks
        for fork in list(open_forks.values()):
            parent = holders.get(fork.parent_id)
            if parent is None or parent.num_computed_tokens < fork.num_tokens:
                del open_forks[fork.child_id]
                self._on_refused(fork.child_id)

    def are_declared(self, holders: dict[int, Sequence]) -> None:
        """The KV manager has been told of the parents, and is asked anew."""
        for fork in self._pool.account.open_forks.values():
            self._pool.account.ask_fork(fork, holders[fork.parent_id], self._forking[fork.child_id])
