"""Reads what a scheduler does, and why a request took as long as it did."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from octavo.common.codecs.arrays import unpack_float64, unpack_int32, unpack_int64
from octavo.common.links import Address, TlsFiles, open_channel
from octavo.common.roles import Role
from octavo.v1 import scheduler_service_pb2 as pb
from octavo.v1 import scheduler_service_pb2_grpc as pb_grpc

_STATES = ("", "waiting", "running", "swapped")
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class LiveSequence:
    """A sequence that is alive."""

    sequence_id: int
    request_id: str
    choice_index: int
    state: str
    waits_for: str
    """Empty if it runs."""
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The last steps, at most 512. Times in seconds."""

    num_steps: int
    span_s: float
    """Begin of the first to end of the last."""
    busy_s: float
    idle_s: float
    """Without a plan."""
    num_stalls: int
    stall_s: float
    mean_rows: float


@dataclass(frozen=True, slots=True)
class ActivityView:
    """A scheduler at one moment."""

    queues: dict[str, int]
    """Sequences by queue, and the `slots` of the worker."""
    sequences: list[LiveSequence]
    steps: StepSummary


async def read_activity(address: Address, tls: TlsFiles | None = None) -> ActivityView:
    """Raises grpc.aio.AioRpcError if the scheduler does not answer."""
    async with open_channel(address.grpc_target, Role.SCHEDULER, tls) as channel:
        stub: Any = pb_grpc.SchedulerServiceStub(channel)
        frames = stub.WatchActivity(pb.WatchActivityRequest(), timeout=_TIMEOUT_S)
        frame = await frames.read()
        frames.cancel()
    return _view(frame)


async def read_explanation(address: Address, request_id: str, tls: TlsFiles | None = None) -> dict[str, Any]:
    """See docs/api.md. Raises grpc.aio.AioRpcError, with NOT_FOUND if the request is unknown."""
    async with open_channel(address.grpc_target, Role.SCHEDULER, tls) as channel:
        stub: Any = pb_grpc.SchedulerServiceStub(channel)
        answer = await stub.ExplainRequest(pb.ExplainRequestRequest(request_id=request_id), timeout=_TIMEOUT_S)
    explanation: dict[str, Any] = json.loads(answer.explanation)
    return explanation


def _view(frame: pb.ActivityFrame) -> ActivityView:
    names = {name.sequence_id: name for name in frame.names}
    sequences = [
        LiveSequence(
            sequence_id=sequence_id,
            request_id=names[sequence_id].request_id if sequence_id in names else "",
            choice_index=names[sequence_id].choice_index if sequence_id in names else 0,
            state=_STATES[state],
            waits_for=frame.wait_causes[cause],
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
        )
        for sequence_id, state, cause, num_tokens, num_prompt_tokens, num_computed_tokens in zip(
            unpack_int64(frame.sequence_ids),
            frame.states,
            frame.waits_for,
            unpack_int32(frame.num_tokens),
            unpack_int32(frame.num_prompt_tokens),
            unpack_int32(frame.num_computed_tokens),
            strict=True,
        )
    ]
    queues = {
        "running": frame.num_running,
        "waiting": frame.num_waiting - frame.num_parked,
        "waiting_for_shared_prefix": frame.num_parked,
        "swapped": frame.num_swapped,
        "slots": frame.max_num_running,
    }
    return ActivityView(queues, sequences, _steps(frame))


def _steps(frame: pb.ActivityFrame) -> StepSummary:
    ends = unpack_float64(frame.step_ended_s)
    compute_us, idle_us = unpack_int32(frame.step_compute_us), unpack_int32(frame.step_idle_us)
    if not ends:
        return StepSummary(0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)
    began_s = ends[0] - compute_us[0] * 1e-6
    stalls = [stall for stall in frame.stalls if stall.ended_s > began_s]
    return StepSummary(
        num_steps=len(ends),
        span_s=ends[-1] - began_s,
        busy_s=sum(compute_us) * 1e-6,
        idle_s=sum(idle_us[1:]) * 1e-6,
        num_stalls=len(stalls),
        stall_s=sum(stall.ended_s - stall.began_s for stall in stalls),
        mean_rows=sum(unpack_int32(frame.step_rows)) / len(ends),
    )
