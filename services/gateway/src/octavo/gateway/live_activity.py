"""Owns what the gateway knows of the scheduler's activity, to show the last of it to whoever comes."""

from __future__ import annotations

from collections import deque
from typing import Any

from octavo.common.codecs.arrays import unpack_float64, unpack_int32, unpack_int64
from octavo.gateway.live_frames import json_frame
from octavo.v1 import scheduler_service_pb2 as pb

MAX_STEPS, MAX_STALLS, MAX_ENDED = 1024, 256, 1024

_Columns = list[list[Any]]


class LiveActivity:
    """Who is there, as of the last frame, and the last steps, stalls and ended requests."""

    def __init__(self) -> None:
        self._present: dict[str, Any] | None = None
        self._names: dict[int, tuple[str, int]] = {}
        self._is_first = True
        self._steps: deque[list[Any]] = deque(maxlen=MAX_STEPS)
        self._stalls: deque[list[Any]] = deque(maxlen=MAX_STALLS)
        self._ended: deque[list[Any]] = deque(maxlen=MAX_ENDED)

    def take(self, frame: pb.ActivityFrame) -> list[bytes]:
        """Remember a frame. Returns it as frames of the live view."""
        sequence_ids = unpack_int64(frame.sequence_ids)
        named = {name.sequence_id: (name.request_id, name.choice_index) for name in frame.names}
        known = {**self._names, **named}
        self._names = {sequence_id: known[sequence_id] for sequence_id in sequence_ids if sequence_id in known}
        columns = [
            sequence_ids,
            list(frame.states),
            unpack_int32(frame.num_tokens),
            unpack_int32(frame.num_prompt_tokens),
            unpack_int32(frame.num_computed_tokens),
            list(frame.waits_for),
        ]
        self._present = {
            "type": "activity",
            "now": frame.now_s,
            "queues": {
                "waiting": frame.num_waiting - frame.num_parked,
                "parked": frame.num_parked,
                "running": frame.num_running,
                "swapped": frame.num_swapped,
                "max_running": frame.max_num_running,
            },
            "totals": {
                "output_tokens": frame.num_output_tokens,
                "prompt_tokens": frame.num_prompt_tokens_in,
                "preemptions": frame.num_preemptions,
            },
            "causes": list(frame.wait_causes),
            "sequences": columns,
            "num_unlisted": frame.num_unlisted,
        }
        steps, stalls, ended = _events(frame)
        self._steps.extend(steps)
        self._stalls.extend(stalls)
        self._ended.extend(ended)
        is_first, self._is_first = self._is_first, False
        return [self._told(is_first, named, steps, stalls, ended)]

    def everything(self) -> list[bytes]:
        """Frames of the live view for one that knows nothing."""
        if self._present is None:
            return []
        return [self._told(True, self._names, list(self._steps), list(self._stalls), list(self._ended))]

    def forget(self) -> None:
        """It is not followed any more."""
        self._present, self._names, self._is_first = None, {}, True
        for record in (self._steps, self._stalls, self._ended):
            record.clear()

    def _told(
        self, is_first: bool, names: dict[int, tuple[str, int]], steps: _Columns, stalls: _Columns, ended: _Columns
    ) -> bytes:
        named = [[sequence_id, *name] for sequence_id, name in names.items()]
        assert self._present is not None
        return json_frame(
            {**self._present, "is_first": is_first, "names": named, "steps": steps, "stalls": stalls, "ended": ended}
        )


def _events(frame: pb.ActivityFrame) -> tuple[_Columns, _Columns, _Columns]:
    steps = zip(
        unpack_int64(frame.step_ids),
        unpack_float64(frame.step_launched_s),
        unpack_float64(frame.step_ended_s),
        unpack_int32(frame.step_compute_us),
        unpack_int32(frame.step_idle_us),
        unpack_int32(frame.step_rows),
        unpack_int32(frame.step_tokens),
        unpack_int32(frame.step_prefill_tokens),
        strict=True,
    )
    ended = [
        [
            request.request_id,
            request.ended_s,
            request.ttft_s if request.HasField("ttft_s") else None,
            request.decode_s,
            request.num_output_tokens,
            request.num_choices,
            request.is_failed,
        ]
        for request in frame.ended
    ]
    stalls: _Columns = [[stall.began_s, stall.ended_s, stall.cause] for stall in frame.stalls]
    return [list(step) for step in steps], stalls, ended
