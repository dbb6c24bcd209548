"""Codec of the scheduler-worker stream."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from octavo.common.codecs.arrays import pack_int32, pack_int64, unpack_int32, unpack_int64
from octavo.common.codecs.generation import (
    logprobs_from_proto,
    logprobs_to_proto,
    prompt_logprobs_from_proto,
    prompt_logprobs_to_proto,
)
from octavo.common.codecs.kv_reply import copy_from_proto, copy_to_proto, transfer_from_proto, transfer_to_proto
from octavo.common.codecs.token_rules import rules_from_proto, rules_to_proto
from octavo.common.errors import ProtocolError
from octavo.common.links.link import StreamCodec
from octavo.common.messages.step import (
    OpenSlot,
    SharingGroup,
    SlotRules,
    StepPlan,
    StepRefused,
    StepResult,
    TableDelta,
    WorkerHello,
    WorkerReady,
    WorkerReply,
    WorkerRequest,
)
from octavo.common.roles import Role
from octavo.v1 import worker_service_pb2 as pb


def encode_request(message: WorkerRequest) -> bytes:
    if isinstance(message, WorkerHello):
        hello = pb.WorkerHello(
            epoch=message.epoch,
            resume_incarnation=message.resume_incarnation,
            last_result=message.last_result,
            begins_new_life=message.begins_new_life,
        )
        return pb.WorkerRequest(hello=hello).SerializeToString()
    return pb.WorkerRequest(plan=_plan_to_proto(message)).SerializeToString()


def decode_request(body: bytes) -> WorkerRequest:
    try:
        request = pb.WorkerRequest.FromString(body)
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    match request.WhichOneof("message"):
        case "hello":
            hello = request.hello
            return WorkerHello(hello.epoch, hello.resume_incarnation, hello.last_result, hello.begins_new_life)
        case "plan":
            return _plan_from_proto(request.plan)
    raise ProtocolError("WorkerRequest with no message set")


def _plan_to_proto(plan: StepPlan) -> pb.StepPlan:
    deltas = plan.table_deltas
    return pb.StepPlan(
        step_id=plan.step_id,
        closed_slots=pack_int32(plan.closed_slots),
        opened_slots=[
            pb.OpenSlot(
                slot=opened.slot,
                sequence_id=opened.sequence_id,
                seeds=opened.seeds,
                temperature=opened.temperature,
                top_p=opened.top_p,
                top_k=opened.top_k,
                num_logprobs=opened.num_logprobs,
                rules=_rules_to_proto(opened.rules) if opened.rules is not None else None,
                traceparent=opened.traceparent,
            )
            for opened in plan.opened_slots
        ],
        delta_slots=pack_int32([delta.slot for delta in deltas]),
        delta_start_indexes=pack_int32([delta.start_index for delta in deltas]),
        delta_num_blocks=pack_int32([len(delta.block_ids) for delta in deltas]),
        delta_block_ids=pack_int32([block_id for delta in deltas for block_id in delta.block_ids]),
        delta_generations=pack_int32([generation for delta in deltas for generation in delta.generations]),
        copies=[copy_to_proto(copy) for copy in plan.copies],
        row_slots=pack_int32(plan.slots),
        row_starts=pack_int32(plan.starts),
        row_lengths=pack_int32(plan.lengths),
        row_flags=bytes(plan.flags),
        token_ids=pack_int32(plan.token_ids),
        transfers=[transfer_to_proto(transfer) for transfer in plan.transfers],
        group_slots=pack_int32([slot for group in plan.groups for slot in group.slots]),
        group_num_slots=pack_int32([len(group.slots) for group in plan.groups]),
        group_num_blocks=pack_int32([group.num_blocks for group in plan.groups]),
        acknowledged_step=plan.acknowledged_step,
    )


def _plan_from_proto(plan: pb.StepPlan) -> StepPlan:
    return StepPlan(
        step_id=plan.step_id,
        closed_slots=unpack_int32(plan.closed_slots),
        opened_slots=[
            OpenSlot(
                slot=opened.slot,
                sequence_id=opened.sequence_id,
                seeds=tuple(opened.seeds),
                temperature=opened.temperature,
                top_p=opened.top_p,
                top_k=opened.top_k,
                num_logprobs=opened.num_logprobs if opened.HasField("num_logprobs") else None,
                rules=_rules_from_proto(opened.rules) if opened.HasField("rules") else None,
                traceparent=opened.traceparent,
            )
            for opened in plan.opened_slots
        ],
        table_deltas=_deltas_from_proto(plan),
        copies=[copy_from_proto(copy) for copy in plan.copies],
        slots=unpack_int32(plan.row_slots),
        starts=unpack_int32(plan.row_starts),
        lengths=unpack_int32(plan.row_lengths),
        flags=list(plan.row_flags),
        token_ids=unpack_int32(plan.token_ids),
        transfers=[transfer_from_proto(transfer) for transfer in plan.transfers],
        groups=_groups_from_proto(plan),
        acknowledged_step=plan.acknowledged_step,
    )


def _rules_to_proto(slot: SlotRules) -> pb.SlotRules:
    return pb.SlotRules(
        rules=rules_to_proto(slot.rules),
        prompt_token_ids=pack_int32(slot.prompt_token_ids),
        output_token_ids=pack_int32(slot.output_token_ids),
        ending_token_ids=pack_int32(slot.ending_token_ids),
        num_prompt_logprobs=slot.num_prompt_logprobs,
    )


def _rules_from_proto(slot: pb.SlotRules) -> SlotRules:
    return SlotRules(
        rules=rules_from_proto(slot.rules),
        prompt_token_ids=tuple(unpack_int32(slot.prompt_token_ids)),
        output_token_ids=tuple(unpack_int32(slot.output_token_ids)),
        ending_token_ids=tuple(unpack_int32(slot.ending_token_ids)),
        num_prompt_logprobs=slot.num_prompt_logprobs if slot.HasField("num_prompt_logprobs") else None,
    )


def _deltas_from_proto(plan: pb.StepPlan) -> list[TableDelta]:
    block_ids, generations = unpack_int32(plan.delta_block_ids), unpack_int32(plan.delta_generations)
    deltas, end = [], 0
    for slot, start_index, num_blocks in zip(
        unpack_int32(plan.delta_slots),
        unpack_int32(plan.delta_start_indexes),
        unpack_int32(plan.delta_num_blocks),
        strict=True,
    ):
        begin, end = end, end + num_blocks
        deltas.append(TableDelta(slot, start_index, tuple(block_ids[begin:end]), tuple(generations[begin:end])))
    return deltas


def _groups_from_proto(plan: pb.StepPlan) -> list[SharingGroup]:
    slots = unpack_int32(plan.group_slots)
    groups, end = [], 0
    for num_slots, num_blocks in zip(
        unpack_int32(plan.group_num_slots), unpack_int32(plan.group_num_blocks), strict=True
    ):
        begin, end = end, end + num_slots
        groups.append(SharingGroup(tuple(slots[begin:end]), num_blocks))
    return groups


def encode_reply(message: WorkerReply) -> bytes:
    if isinstance(message, StepResult):
        result = pb.StepResult(
            step_id=message.step_id,
            token_ids=pack_int32(message.token_ids),
            logprobs=[
                logprobs_to_proto(index, logprobs)
                for index, logprobs in enumerate(message.logprobs)
                if logprobs is not None
            ],
            compute_us=message.compute_us,
            idle_us=message.idle_us,
            finished_transfers=pack_int64(message.finished_transfers),
            transfer_us=message.transfer_us,
            prompt_logprobs=[prompt_logprobs_to_proto(*told) for told in message.prompt_logprobs],
        )
        return pb.WorkerResponse(result=result).SerializeToString()
    if isinstance(message, StepRefused):
        refused = pb.StepRefused(step_id=message.step_id, reason=message.reason, message=message.message)
        return pb.WorkerResponse(refused=refused).SerializeToString()
    ready = pb.WorkerReady(
        incarnation=message.incarnation,
        model_name=message.model_name,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=pack_int32(message.eos_token_ids),
        num_host_blocks=message.num_host_blocks,
        is_resumed=message.is_resumed,
        last_step=message.last_step,
        kv_format=message.kv_format,
        generations=pack_int32(message.generations),
    )
    return pb.WorkerResponse(ready=ready).SerializeToString()


def decode_reply(body: bytes) -> WorkerReply:
    try:
        response = pb.WorkerResponse.FromString(body)
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    match response.WhichOneof("message"):
        case "ready":
            ready = response.ready
            return WorkerReady(
                incarnation=ready.incarnation,
                model_name=ready.model_name,
                num_blocks=ready.num_blocks,
                block_size=ready.block_size,
                max_num_seqs=ready.max_num_seqs,
                max_num_batched_tokens=ready.max_num_batched_tokens,
                max_model_len=ready.max_model_len,
                vocab_size=ready.vocab_size,
                eos_token_ids=tuple(unpack_int32(ready.eos_token_ids)),
                num_host_blocks=ready.num_host_blocks,
                is_resumed=ready.is_resumed,
                last_step=ready.last_step,
                kv_format=ready.kv_format,
                generations=tuple(unpack_int32(ready.generations)),
            )
        case "result":
            return _result_from_proto(response.result)
        case "refused":
            refused = response.refused
            return StepRefused(refused.step_id, refused.reason, refused.message)
    raise ProtocolError("WorkerResponse with no message set")


def _result_from_proto(result: pb.StepResult) -> StepResult:
    token_ids = unpack_int32(result.token_ids)
    by_index = {entry.token_index: logprobs_from_proto(entry) for entry in result.logprobs}
    return StepResult(
        step_id=result.step_id,
        token_ids=token_ids,
        logprobs=[by_index.get(index) for index in range(len(token_ids))] if by_index else [],
        compute_us=result.compute_us,
        idle_us=result.idle_us,
        finished_transfers=unpack_int64(result.finished_transfers),
        transfer_us=result.transfer_us,
        prompt_logprobs=[prompt_logprobs_from_proto(told) for told in result.prompt_logprobs],
    )


WORKER_STEPS: StreamCodec[WorkerRequest, WorkerReply] = StreamCodec(
    method="/octavo.v1.WorkerService/Steps",
    client=Role.SCHEDULER,
    server=Role.WORKER,
    encode_client=encode_request,
    decode_client=decode_request,
    encode_server=encode_reply,
    decode_server=decode_reply,
)
