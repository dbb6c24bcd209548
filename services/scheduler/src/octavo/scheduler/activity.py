"""Tells one watcher what the scheduler does: who is there now, and what has happened since its last look."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import islice

from octavo.common.codecs.arrays import pack_float64, pack_int32, pack_int64
from octavo.scheduler.core import SchedulerCore
from octavo.scheduler.request_records import WaitCause
from octavo.scheduler.sequence import Sequence
from octavo.v1 import scheduler_service_pb2 as pb

MAX_SEQUENCES = 1024
"""That run or are swapped, in one frame."""
MAX_WAITING = 256
MAX_STEPS, MAX_STALLS, MAX_ENDED = 512, 128, 256
"""In one frame; the last ones."""
_WAITS, _RUNS, _IS_SWAPPED = 1, 2, 3
_CAUSES = ["", *(cause.value for cause in WaitCause)]
_CAUSE_NUMBERS = {cause: number for number, cause in enumerate(_CAUSES)}


class ActivityWatch:
    """What one watcher has been told."""

    def __init__(self, core: SchedulerCore) -> None:
        self._core = core
        self._cursor = (0, 0, 0)
        self._named: set[int] = set()

    def look(self, now: float) -> pb.ActivityFrame:
        """What is to be told now. Takes about 1 ms for 500 sequences."""
        core = self._core
        frame = pb.ActivityFrame(
            now_s=now,
            num_waiting=core.num_waiting,
            num_parked=core.num_parked,
            num_running=core.num_running,
            num_swapped=core.num_swapped,
            max_num_running=core.model.max_num_seqs if core.model else 0,
            wait_causes=_CAUSES,
            num_output_tokens=core.stats.num_output_tokens,
            num_prompt_tokens_in=core.stats.num_prompt_tokens,
            num_preemptions=core.stats.num_preemptions,
        )
        self._add_sequences(frame)
        self._add_events(frame)
        return frame

    def _add_sequences(self, frame: pb.ActivityFrame) -> None:
        running, swapped, waiting = self._core.present()
        running, swapped = running[:MAX_SEQUENCES], swapped[: max(0, MAX_SEQUENCES - len(running))]
        first_waiting = list(islice(waiting, MAX_WAITING))
        listed = [*running, *swapped, *first_waiting]
        states = [_RUNS] * len(running) + [_IS_SWAPPED] * len(swapped) + [_WAITS] * len(first_waiting)
        frame.sequence_ids = pack_int64([sequence.sequence_id for sequence in listed])
        frame.states = bytes(states)
        lengths = [sequence.lengths for sequence in listed]
        frame.num_tokens = pack_int32([num_tokens for num_tokens, _ in lengths])
        frame.num_prompt_tokens = pack_int32([sequence.request.num_prompt_tokens for sequence in listed])
        frame.num_computed_tokens = pack_int32([num_computed for _, num_computed in lengths])
        waits_for = self._core.log.waits_for
        frame.waits_for = bytes([_CAUSE_NUMBERS[waits_for(sequence.sequence_id) or ""] for sequence in listed])
        self._add_names(frame, listed)

    def _add_names(self, frame: pb.ActivityFrame, listed: list[Sequence]) -> None:
        present = {sequence.sequence_id for sequence in listed}
        for sequence in listed:
            if sequence.sequence_id not in self._named:
                frame.names.add(
                    sequence_id=sequence.sequence_id,
                    request_id=sequence.request.request_id,
                    choice_index=sequence.choice_index,
                )
        self._named = present

    def _add_events(self, frame: pb.ActivityFrame) -> None:
        timeline = self._core.stats.timeline
        if self._cursor == (0, 0, 0):  # what came before anybody looked is not news, but for the last of it
            self._cursor = (
                max(0, timeline.steps.num_ever - MAX_STEPS),
                max(0, timeline.stalls.num_ever - MAX_STALLS),
                max(0, timeline.ended.num_ever - MAX_ENDED),
            )
        steps, missed_steps = timeline.steps.since(self._cursor[0])
        stalls, missed_stalls = timeline.stalls.since(self._cursor[1])
        ended, missed_ended = timeline.ended.since(self._cursor[2])
        self._cursor = timeline.cursor()
        cut = max(0, len(steps) - MAX_STEPS) + max(0, len(stalls) - MAX_STALLS) + max(0, len(ended) - MAX_ENDED)
        frame.num_unlisted = missed_steps + missed_stalls + missed_ended + cut
        steps = steps[-MAX_STEPS:]
        frame.step_ids = pack_int64([step.step_id for step in steps])
        frame.step_launched_s = pack_float64([step.launched_at for step in steps])
        frame.step_ended_s = pack_float64([step.ended_at for step in steps])
        frame.step_compute_us = pack_int32([step.compute_us for step in steps])
        frame.step_idle_us = pack_int32([step.idle_us for step in steps])
        frame.step_rows = pack_int32([step.num_rows for step in steps])
        frame.step_tokens = pack_int32([step.num_tokens for step in steps])
        frame.step_prefill_tokens = pack_int32([step.num_prefill_tokens for step in steps])
        for stall in stalls[-MAX_STALLS:]:
            frame.stalls.add(began_s=stall.began_at, ended_s=stall.ended_at, cause=stall.cause)
        for request in ended[-MAX_ENDED:]:
            frame.ended.add(
                request_id=request.request_id,
                ended_s=request.ended_at,
                ttft_s=request.ttft_s,
                decode_s=request.decode_s,
                num_output_tokens=request.num_output_tokens,
                num_choices=request.num_choices,
                is_failed=request.is_failed,
            )


async def watch_activity(
    core: SchedulerCore, interval_s: float, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[pb.ActivityFrame]:
    """Frames without end."""
    watch = ActivityWatch(core)
    while True:
        yield watch.look(clock())
        await asyncio.sleep(interval_s)
