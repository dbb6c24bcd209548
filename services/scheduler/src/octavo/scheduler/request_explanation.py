"""Tells people and programs what the records of a request say. The fields are described in docs/api.md."""

from __future__ import annotations

from typing import Any

from octavo.common.messages.kv import MissReason
from octavo.scheduler.request_records import (
    HIT_HOST,
    SLOWER_TIER,
    AdmissionRecord,
    Miss,
    PreemptionRecord,
    RequestRecord,
    SequenceRecord,
)


def explain(
    request_id: str, records: list[RequestRecord], now: float, now_unix_s: float, *, for_operator: bool
) -> dict[str, Any]:
    """One entry for each prompt. Times but `arrived_at` are seconds, those named `at_s` since the arrival.

    What tells of other tenants is withheld unless it is `for_operator`: the id of a request with another salt, and
    that a block is stored under another salt, which then reads as never stored.
    """
    prompts = [_Explanation(record, now, for_operator).prompt(now_unix_s) for record in records]
    return {"id": request_id, "object": "request.explanation", "prompts": prompts}


class _Explanation:
    def __init__(self, record: RequestRecord, now: float, for_operator: bool) -> None:
        self._record = record
        self._now = now
        self._for_operator = for_operator

    def prompt(self, now_unix_s: float) -> dict[str, Any]:
        record = self._record
        waits = [sequence.waits_for for sequence in record.sequences if sequence.ended_at is None]
        if record.error is not None:
            state = "failed"
        elif record.ended_at is not None:
            state = "ended"
        else:
            state = "running" if None in waits else "waiting"
        found = {
            "id": record.request_id,
            "state": state,
            "arrived_at": round(now_unix_s - (self._now - record.arrived_at), 3),
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_choices": record.num_choices,
            "first_token_s": self._since_arrival(record.first_token_at),
            "ended_s": self._since_arrival(record.ended_at),
            "error": {"reason": record.error[0], "message": record.error[1]} if record.error else None,
            "sequences": [self._sequence(sequence) for sequence in record.sequences],
        }
        if record.num_unlisted:
            found["num_unlisted_sequences"] = record.num_unlisted
        return found

    def _sequence(self, sequence: SequenceRecord) -> dict[str, Any]:
        waited = dict(sequence.wait_s)
        if sequence.waits_for is not None:
            waited[sequence.waits_for] = waited.get(sequence.waits_for, 0.0) + self._now - sequence.waits_since
        found: dict[str, Any] = {
            "choice_index": sequence.choice_index,
            "waits_for": sequence.waits_for,
            "waited_s": {cause: round(seconds, 6) for cause, seconds in waited.items()},
            "admissions": [self._admission(admission) for admission in sequence.admissions],
            "preemptions": [self._preemption(preemption) for preemption in sequence.preemptions],
            "finish_reason": sequence.finish_reason,
            "ended_s": self._since_arrival(sequence.ended_at),
        }
        if self._for_operator:
            found["sequence_id"] = sequence.sequence_id
        for name, listed, total in (
            ("num_unlisted_admissions", sequence.admissions, sequence.num_admissions),
            ("num_unlisted_preemptions", sequence.preemptions, sequence.num_preemptions),
        ):
            if total > len(listed):
                found[name] = total - len(listed)
        return found

    def _admission(self, admission: AdmissionRecord) -> dict[str, Any]:
        outcomes = admission.outcomes()
        if not self._for_operator and (hidden := outcomes.pop("other_salt", 0)):
            outcomes["never_stored"] = outcomes.get("never_stored", 0) + hidden
        found: dict[str, Any] = {
            "at_s": self._since_arrival(admission.at),
            "num_tokens": admission.num_tokens,
            "num_blocks": admission.num_blocks,
            "blocks": outcomes,
        }
        if admission.block_costs is not None and (outcomes.keys() & {HIT_HOST, SLOWER_TIER}):
            copy_s, compute_s = admission.block_costs
            found["block_copy_s"], found["block_compute_s"] = round(copy_s, 9), round(compute_s, 9)
        evictors = [evictor for miss in admission.misses if (evictor := self._evictor(miss))]
        if evictors:
            found["evicted_by"] = evictors
        return found

    def _evictor(self, miss: Miss) -> str | None:
        is_shown = miss.reason is MissReason.EVICTED and (self._for_operator or miss.evictor_is_own)
        return miss.evicted_by if is_shown else None

    def _preemption(self, preemption: PreemptionRecord) -> dict[str, Any]:
        back_at = preemption.back_at
        return {
            "at_s": self._since_arrival(preemption.at),
            "why": preemption.why,
            "kind": preemption.kind,
            "num_computed_tokens": preemption.num_computed_tokens,
            "num_blocks": preemption.num_blocks,
            "num_swapped_blocks": preemption.num_swapped_blocks,
            "num_tokens_computed_again": preemption.num_tokens_again,
            "cost_s": None if preemption.cost_s is None else round(preemption.cost_s, 6),
            "back_after_s": None if back_at is None else round(back_at - preemption.at, 6),
        }

    def _since_arrival(self, at: float | None) -> float | None:
        return None if at is None else round(at - self._record.arrived_at, 6)
