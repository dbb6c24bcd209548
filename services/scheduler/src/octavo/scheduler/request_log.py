"""Owns the records of live requests, and of the last ones that ended: who waited, for what, how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from octavo.common.errors import OctavoError
from octavo.common.messages.generation import FinishReason, Submit
from octavo.common.messages.kv import Admitted, MissReason
from octavo.scheduler.preemption_cost import PreemptionCost
from octavo.scheduler.request_records import (
    BLOCK_OUTCOMES,
    AdmissionRecord,
    Miss,
    PreemptionRecord,
    RequestRecord,
    SequenceRecord,
    WaitCause,
)
from octavo.scheduler.sequence import Request, Sequence
from octavo.scheduler.timeline import EndedRequest, Timeline

MAX_SEQUENCES = 64
"""Sequences of one request whose records are kept after they have ended."""
MAX_EVENTS = 32
"""Admissions of one sequence that are kept, and as many preemptions. Later ones are counted."""


class RequestLog:
    """Told of every change of a sequence's state, and of nothing that happens once a step or once a token.

    What happened is dated by the next `settle`, which the core calls after every event.
    """

    def __init__(self, num_ended_kept: int, timeline: Timeline) -> None:
        """`timeline`: told of requests that have ended."""
        self.wait_s = dict.fromkeys(WaitCause, 0.0)
        """Waits that are over, of all sequences, in seconds."""
        self.prefix_blocks = dict.fromkeys(BLOCK_OUTCOMES, 0)
        """Blocks of all admissions by what became of them."""
        self.cost: PreemptionCost | None = None
        """What blocks cost on the present worker."""
        self.num_tokens_again = 0
        """Tokens that preempted sequences computed a second time."""
        self.preemption_cost_s = {"recompute": 0.0, "swap": 0.0}
        """What is known of the cost of preemptions, by kind."""
        self._timeline = timeline
        self.on_ended: Callable[[RequestRecord, float], None] | None = None
        """Told of a traced request that has ended, and when."""
        self._num_ended_kept = num_ended_kept
        self._by_id: dict[str, RequestRecord] = {}
        """Of several requests of one id, the last."""
        self._live: dict[Request, RequestRecord] = {}
        self._sequences: dict[int, SequenceRecord] = {}
        self._ended: deque[RequestRecord] = deque()
        self._pending: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._head: Sequence | None = None
        self._head_cause: WaitCause | None = None

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def find(self, request_id: str) -> list[RequestRecord]:
        """The request of that id; if there is none, those that a gateway made of its prompts: `ID-0`, `ID-1`, ..."""
        if found := self._by_id.get(request_id):
            return [found]
        parts: list[RequestRecord] = []
        while part := self._by_id.get(f"{request_id}-{len(parts)}"):
            parts.append(part)
        return parts

    def waits_for(self, sequence_id: int) -> WaitCause | None:
        """Why the sequence is not running; None if it is, or is not known."""
        own = self._sequences.get(sequence_id)
        return None if own is None else own.waits_for

    # What happens.

    def arrived(self, sequence: Sequence) -> None:
        """A new sequence, of a new request or of one that is known."""
        self._note(self._arrived, sequence)

    def refused(self, submit: Submit, error: OctavoError) -> None:
        self._note(self._refused, submit, error)

    def waits(self, sequence: Sequence, cause: WaitCause) -> None:
        self._note(self._waits, sequence.sequence_id, cause)

    def head_waits(self, sequence: Sequence | None, cause: WaitCause) -> None:
        """What keeps the first of the queue waiting, or that there is none. A cause that is known in more detail
        stands while NO_BLOCKS is told."""
        if sequence is self._head and cause is self._head_cause:
            return
        if self._head is not None and self._head is not sequence:
            self._note(self._no_longer_first, self._head.sequence_id)
        self._head, self._head_cause = sequence, cause
        if sequence is not None:
            self._note(self._first_waits, sequence.sequence_id, cause)

    def asks(self, sequence: Sequence) -> None:
        """The KV manager is asked for its blocks."""
        if sequence is self._head:
            self._head = None
        self.waits(sequence, WaitCause.KV_ANSWER)

    def admitted(self, sequence: Sequence, admitted: Admitted, block_size: int) -> None:
        self._note(self._admitted, sequence.sequence_id, len(sequence.token_ids), admitted, block_size)

    def runs(self, sequence: Sequence) -> None:
        """It has blocks, without having looked for a prefix: a fork, or back from host memory."""
        self._note(self._runs, sequence.sequence_id)

    def no_longer_starves(self, sequence: Sequence) -> None:
        """Its row sat out for want of a block: there is one, or it has given way."""
        self._note(self._no_longer_starves, sequence.sequence_id)

    def pool_is_back(self) -> None:
        self._note(self._pool_is_back)

    def preempted(self, sequence: Sequence, why: str, kind: str, cause: WaitCause, num_swapped_blocks: int = 0) -> None:
        """To be told while the sequence still has what it loses, if anything; afterwards it waits for `cause`."""
        num_computed, num_blocks = sequence.num_computed_tokens, len(sequence.block_table)
        preemption = PreemptionRecord(0.0, why, kind, num_computed, num_blocks, num_swapped_blocks)
        self._note(self._preempted, sequence.sequence_id, preemption, cause)

    def token_came(self, sequence: Sequence) -> None:
        """The first token since it got its blocks."""
        self._note(self._token_came, sequence.sequence_id)

    def choice_ended(self, sequence: Sequence, reason: FinishReason, *, goes_on: bool) -> None:
        """`goes_on`: its sequence still computes the prompt, for the other choices."""
        self._note(self._choice_ended, sequence.sequence_id, sequence.num_output_tokens, reason, goes_on)

    def dropped(self, sequence: Sequence) -> None:
        """A beam that none of the next ones continues."""
        self._note(self._dropped, sequence.sequence_id)

    def ended(self, request: Request, error: OctavoError | None = None) -> None:
        self._note(self._request_ended, request, error)

    def settle(self, now: float) -> None:
        """Date everything that happened since the last time."""
        if self._pending:
            pending, self._pending = self._pending, []
            for event, arguments in pending:
                event(now, *arguments)

    # The same, dated.

    def _note(self, event: Callable[..., None], *arguments: Any) -> None:
        self._pending.append((event, arguments))

    def _alive(self, sequence_id: int) -> SequenceRecord | None:
        own = self._sequences.get(sequence_id)
        return own if own is not None and own.ended_at is None else None

    def _arrived(self, now: float, sequence: Sequence) -> None:
        request = sequence.request
        record = self._live.get(request)
        if record is None:
            record = RequestRecord(
                request.request_id,
                request.salt,
                request.num_prompt_tokens,
                request.params.n,
                arrived_at=now,
                traceparent=request.traceparent,
            )
            self._live[request] = self._by_id[request.request_id] = record
        own = SequenceRecord(sequence.sequence_id, sequence.choice_index, record)
        own.waits(WaitCause.BEHIND_OTHERS, now)
        self._sequences[sequence.sequence_id] = own
        if len(record.sequences) < MAX_SEQUENCES:
            record.sequences.append(own)
        else:
            record.num_unlisted += 1
            record.unlisted[own.sequence_id] = own

    def _refused(self, now: float, submit: Submit, error: OctavoError) -> None:
        record = RequestRecord(
            submit.request_id,
            submit.cache_salt,
            len(submit.prompt_token_ids),
            submit.params.n,
            arrived_at=now,
            traceparent=submit.traceparent,
        )
        record.error, record.ended_at = (error.reason, error.message), now
        self._by_id[submit.request_id] = record
        self._keep_ended(record)

    def _waits(self, now: float, sequence_id: int, cause: WaitCause | None) -> None:
        if own := self._alive(sequence_id):
            self._change_wait(own, cause, now)

    def _runs(self, now: float, sequence_id: int) -> None:
        if own := self._alive(sequence_id):
            self._change_wait(own, None, now)
            self._has_blocks_again(own, None)

    def _no_longer_starves(self, now: float, sequence_id: int) -> None:
        own = self._alive(sequence_id)
        if own is not None and own.waits_for is WaitCause.NO_CREDIT:
            self._change_wait(own, None, now)

    def _has_blocks_again(self, own: SequenceRecord, num_cached_tokens: int | None) -> None:
        """`num_cached_tokens`: what it need not compute; None for all that it had."""
        if not own.preemptions or own.preemptions[-1].num_tokens_again is not None:
            return
        lost = own.preemptions[-1]
        lost.num_tokens_again = 0 if num_cached_tokens is None else max(0, lost.num_computed_tokens - num_cached_tokens)
        self.num_tokens_again += lost.num_tokens_again
        if self.cost is not None:
            lost.cost_s = self.cost.of_swap(lost.num_swapped_blocks) + self.cost.of_recompute(lost.num_tokens_again)
            self.preemption_cost_s[lost.kind] += lost.cost_s

    def _pool_is_back(self, now: float) -> None:
        for record in self._live.values():
            for own in [*record.sequences, *record.unlisted.values()]:
                if own.waits_for is WaitCause.POOL_LOST:
                    self._change_wait(own, WaitCause.BEHIND_OTHERS, now)

    def _first_waits(self, now: float, sequence_id: int, cause: WaitCause) -> None:
        own = self._alive(sequence_id)
        if own is None or own.waits_for in (None, WaitCause.KV_ANSWER):
            return
        if cause is not WaitCause.NO_BLOCKS or own.waits_for is WaitCause.BEHIND_OTHERS:
            self._change_wait(own, cause, now)

    def _no_longer_first(self, now: float, sequence_id: int) -> None:
        own = self._alive(sequence_id)
        if own is not None and own.waits_for in (WaitCause.NO_SLOT, WaitCause.PREFILL_BACKLOG):
            self._change_wait(own, WaitCause.BEHIND_OTHERS, now)

    def _change_wait(self, own: SequenceRecord, cause: WaitCause | None, now: float) -> None:
        if ended := own.waits(cause, now):
            self.wait_s[ended[0]] += ended[1]

    def _admitted(self, now: float, sequence_id: int, num_tokens: int, admitted: Admitted, block_size: int) -> None:
        own = self._alive(sequence_id)
        if own is None:
            return
        self._change_wait(own, None, now)
        num_host_hits = admitted.num_host_tokens // block_size
        admission = AdmissionRecord(
            at=now,
            num_tokens=num_tokens,
            num_blocks=-(-num_tokens // block_size),
            num_device_hits=admitted.num_cached_tokens // block_size - num_host_hits,
            num_host_hits=num_host_hits,
            has_tail=num_tokens % block_size > 0,
            misses=tuple([self._miss(own, m.reason, m.num_blocks, m.evicted_by) for m in admitted.misses]),
            block_costs=(cost.copy_s, cost.compute_s) if (cost := self.cost) and cost.knows_link else None,
        )
        for outcome, count in admission.outcomes().items():
            self.prefix_blocks[outcome] += count
        own.num_admissions += 1
        if len(own.admissions) < MAX_EVENTS:
            own.admissions.append(admission)
        self._has_blocks_again(own, admitted.num_cached_tokens)

    def _miss(self, own: SequenceRecord, reason: MissReason, num_blocks: int, evicted_by: int) -> Miss:
        evictor = self._sequences.get(evicted_by) if evicted_by else None
        if evictor is None:
            return Miss(reason, num_blocks, None, evictor_is_own=False)
        return Miss(reason, num_blocks, evictor.request.request_id, evictor.request.salt == own.request.salt)

    def _preempted(self, now: float, sequence_id: int, preemption: PreemptionRecord, cause: WaitCause) -> None:
        own = self._alive(sequence_id)
        if own is None:
            return
        self._change_wait(own, cause, now)
        if not preemption.num_blocks:
            return
        preemption.at = now
        own.num_preemptions += 1
        if len(own.preemptions) < MAX_EVENTS:
            own.preemptions.append(preemption)

    def _token_came(self, now: float, sequence_id: int) -> None:
        own = self._alive(sequence_id)
        if own is None:
            return
        if own.request.first_token_at is None:
            own.request.first_token_at = now
        if own.preemptions and own.preemptions[-1].back_at is None:
            own.preemptions[-1].back_at = now

    def _choice_ended(
        self, now: float, sequence_id: int, num_output_tokens: int, reason: FinishReason, goes_on: bool
    ) -> None:
        if own := self._alive(sequence_id):
            own.request.num_output_tokens += num_output_tokens
            own.finish_reason = reason.name.lower()
            if not goes_on:
                self._end(own, now)

    def _dropped(self, now: float, sequence_id: int) -> None:
        if own := self._alive(sequence_id):
            self._end(own, now)

    def _end(self, own: SequenceRecord, now: float) -> None:
        self._change_wait(own, None, now)
        own.ended_at = now
        if own.request.unlisted.pop(own.sequence_id, None):
            del self._sequences[own.sequence_id]

    def _request_ended(self, now: float, request: Request, error: OctavoError | None) -> None:
        record = self._live.pop(request, None)
        if record is None:
            return
        for own in [*record.sequences, *record.unlisted.values()]:
            if own.ended_at is None:
                self._end(own, now)
        record.ended_at = now
        if error is not None:
            record.error = (error.reason, error.message)
        first_at = record.first_token_at
        self._timeline.ended.append(
            EndedRequest(
                record.request_id,
                now,
                None if first_at is None else first_at - record.arrived_at,
                0.0 if first_at is None else now - first_at,
                record.num_output_tokens,
                record.num_choices,
                error is not None,
            )
        )
        self._keep_ended(record)

    def _keep_ended(self, record: RequestRecord) -> None:
        if self.on_ended is not None and record.traceparent:
            self.on_ended(record, record.ended_at or record.arrived_at)
        self._ended.append(record)
        while len(self._ended) > self._num_ended_kept:
            self._forget(self._ended.popleft())

    def _forget(self, record: RequestRecord) -> None:
        if self._by_id.get(record.request_id) is record:
            del self._by_id[record.request_id]
        for own in record.sequences:
            self._sequences.pop(own.sequence_id, None)
        record.sequences.clear()  # each refers to the record
