"""Codec of the scheduler-KV manager stream: what the scheduler says."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError

from octavo.common.codecs.arrays import pack_int32, pack_int64, unpack_int32, unpack_int32_array, unpack_int64
from octavo.common.codecs.kv_reply import decode_reply, encode_reply
from octavo.common.errors import ProtocolError
from octavo.common.links.link import StreamCodec
from octavo.common.messages.kv import (
    Admission,
    Arrival,
    DeclaredTable,
    DeclarePool,
    Fork,
    KvManagerReply,
    KvManagerRequest,
    KvRequest,
    OpenPool,
    Publication,
    Release,
    SwapIn,
    SwapOut,
)
from octavo.common.roles import Role
from octavo.v1 import kvmanager_service_pb2 as pb

First = TypeVar("First")


def encode_request(message: KvManagerRequest) -> bytes:
    match message:
        case KvRequest():
            request = pb.KvManagerRequest(step=_step_to_proto(message))
        case OpenPool():
            request = pb.KvManagerRequest(open_pool=_opening_to_proto(message))
        case DeclarePool():
            request = pb.KvManagerRequest(declare_pool=_declaration_to_proto(message))
    return request.SerializeToString()


def decode_request(body: bytes) -> KvManagerRequest:
    try:
        request = pb.KvManagerRequest.FromString(body)
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    match request.WhichOneof("message"):
        case "step":
            return _step_from_proto(request.step)
        case "open_pool":
            return _opening_from_proto(request.open_pool)
        case "declare_pool":
            return _declaration_from_proto(request.declare_pool)
    raise ProtocolError("KvManagerRequest with no message set")


def _opening_to_proto(opening: OpenPool) -> pb.OpenPool:
    return pb.OpenPool(
        pool_id=opening.pool_id,
        epoch=opening.epoch,
        incarnation=opening.incarnation,
        num_blocks=opening.num_blocks,
        block_size=opening.block_size,
        num_host_blocks=opening.num_host_blocks,
        resume_boot_epoch=opening.resume_boot_epoch,
        last_reply_no=opening.last_reply_no,
        kv_format=opening.kv_format,
        generations=pack_int32(opening.generations),
    )


def _opening_from_proto(opening: pb.OpenPool) -> OpenPool:
    return OpenPool(
        pool_id=opening.pool_id,
        epoch=opening.epoch,
        incarnation=opening.incarnation,
        num_blocks=opening.num_blocks,
        block_size=opening.block_size,
        num_host_blocks=opening.num_host_blocks,
        resume_boot_epoch=opening.resume_boot_epoch,
        last_reply_no=opening.last_reply_no,
        kv_format=opening.kv_format,
        generations=tuple(unpack_int32(opening.generations)),
    )


def _declaration_to_proto(declaration: DeclarePool) -> pb.DeclarePool:
    return pb.DeclarePool(
        tables=[
            pb.DeclaredTable(
                sequence_id=table.sequence_id,
                token_ids=pack_int32(table.token_ids),
                num_computed_tokens=table.num_computed_tokens,
                block_ids=pack_int32(table.block_ids),
                generations=pack_int32(table.generations),
                salt=table.salt,
                adapter=table.adapter,
                adapter_generation=table.adapter_generation,
            )
            for table in declaration.tables
        ],
        credit_block_ids=pack_int32([block_id for block_id, _ in declaration.credits]),
        credit_generations=pack_int32([generation for _, generation in declaration.credits]),
        launched_step=declaration.launched_step,
        acknowledged_step=declaration.acknowledged_step,
        recycled_block_ids=pack_int32([block_id for block_id, _ in declaration.recycled]),
        recycled_generations=pack_int32([generation for _, generation in declaration.recycled]),
        highest_generation=declaration.highest_generation,
    )


def _declaration_from_proto(declaration: pb.DeclarePool) -> DeclarePool:
    return DeclarePool(
        tables=[
            DeclaredTable(
                sequence_id=table.sequence_id,
                token_ids=tuple(unpack_int32(table.token_ids)),
                num_computed_tokens=table.num_computed_tokens,
                block_ids=tuple(unpack_int32(table.block_ids)),
                generations=tuple(unpack_int32(table.generations)),
                salt=table.salt,
                adapter=table.adapter,
                adapter_generation=table.adapter_generation,
            )
            for table in declaration.tables
        ],
        credits=_pairs(unpack_int32(declaration.credit_block_ids), unpack_int32(declaration.credit_generations)),
        launched_step=declaration.launched_step,
        acknowledged_step=declaration.acknowledged_step,
        recycled=_pairs(unpack_int32(declaration.recycled_block_ids), unpack_int32(declaration.recycled_generations)),
        highest_generation=declaration.highest_generation,
    )


def _pairs(first: list[First], second: list[int]) -> list[tuple[First, int]]:
    if len(first) != len(second):
        raise ProtocolError(f"arrays of {len(first)} and {len(second)} items belong together")
    return list(zip(first, second, strict=True))


def _fork_to_proto(fork: Fork) -> pb.Fork:
    return pb.Fork(
        parent_id=fork.parent_id,
        child_id=fork.child_id,
        num_tokens=fork.num_tokens,
        num_table_tokens=fork.num_table_tokens,
    )


def _step_to_proto(step: KvRequest) -> pb.KvStep:
    publications = step.publications
    return pb.KvStep(
        message_no=step.message_no,
        acknowledged_step=step.acknowledged_step,
        spent_sequence_ids=pack_int64([sequence_id for sequence_id, _ in step.spent]),
        spent_block_ids=pack_int32([block_id for _, block_id in step.spent]),
        published_sequence_ids=pack_int64([item.sequence_id for item in publications]),
        published_num_computed_tokens=pack_int32([item.num_computed_tokens for item in publications]),
        published_num_new_tokens=pack_int32([len(item.new_token_ids) for item in publications]),
        published_new_token_ids=pack_int32([token_id for item in publications for token_id in item.new_token_ids]),
        forks=[_fork_to_proto(fork) for fork in step.forks],
        released_sequence_ids=pack_int64([release.sequence_id for release in step.releases]),
        released_last_steps=pack_int64([release.last_step for release in step.releases]),
        returned_credits=pack_int32(step.returned_credits),
        admissions=[
            pb.Admission(
                sequence_id=item.sequence_id,
                token_ids=pack_int32(item.token_ids),
                salt=item.salt,
                computes_itself=item.computes_itself,
                ignores_cache=item.ignores_cache,
                num_table_tokens=item.num_table_tokens,
            )
            for item in step.admissions
        ],
        credit_target=step.credit_target,
        arrivals=[
            pb.Arrival(
                sequence_id=item.sequence_id,
                token_ids=pack_int32(item.token_ids),
                salt=item.salt,
                adapter=item.adapter,
                adapter_generation=item.adapter_generation,
            )
            for item in step.arrivals
        ],
        finished_transfers=pack_int64(step.finished_transfers),
        swap_outs=[
            pb.SwapOut(sequence_id=item.sequence_id, num_kept_blocks=item.num_kept_blocks, last_step=item.last_step)
            for item in step.swap_outs
        ],
        swap_ins=[pb.SwapIn(sequence_id=item.sequence_id, num_tokens=item.num_tokens) for item in step.swap_ins],
        last_reply_no=step.last_reply_no,
        skips_host_prefixes=step.skips_host_prefixes,
    )


def _publications_from_proto(step: pb.KvStep) -> list[Publication]:
    if not step.published_sequence_ids:
        return []
    new_token_ids = unpack_int32_array(step.published_new_token_ids)
    publications, end = [], 0
    for (sequence_id, num_computed_tokens), num_new_tokens in _pairs(
        _pairs(unpack_int64(step.published_sequence_ids), unpack_int32(step.published_num_computed_tokens)),
        unpack_int32(step.published_num_new_tokens),
    ):
        begin, end = end, end + max(0, num_new_tokens)
        publications.append(Publication(sequence_id, num_computed_tokens, new_token_ids[begin:end]))
    if end != len(new_token_ids):
        raise ProtocolError(f"{len(new_token_ids)} published tokens, and publications of {end}")
    return publications


def _step_from_proto(step: pb.KvStep) -> KvRequest:
    return KvRequest(
        message_no=step.message_no,
        acknowledged_step=step.acknowledged_step,
        spent=_pairs(unpack_int64(step.spent_sequence_ids), unpack_int32(step.spent_block_ids)),
        publications=_publications_from_proto(step),
        forks=[Fork(item.parent_id, item.child_id, item.num_tokens, item.num_table_tokens) for item in step.forks],
        releases=[
            Release(sequence_id, last_step)
            for sequence_id, last_step in _pairs(
                unpack_int64(step.released_sequence_ids), unpack_int64(step.released_last_steps)
            )
        ],
        returned_credits=unpack_int32(step.returned_credits),
        admissions=[
            Admission(
                item.sequence_id,
                tuple(unpack_int32(item.token_ids)),
                item.salt,
                item.computes_itself,
                item.num_table_tokens,
                item.ignores_cache,
            )
            for item in step.admissions
        ],
        credit_target=step.credit_target,
        arrivals=[
            Arrival(
                item.sequence_id,
                unpack_int32_array(item.token_ids),
                item.salt,
                item.adapter,
                item.adapter_generation,
            )
            for item in step.arrivals
        ],
        finished_transfers=unpack_int64(step.finished_transfers),
        swap_outs=[SwapOut(item.sequence_id, item.num_kept_blocks, item.last_step) for item in step.swap_outs],
        swap_ins=[SwapIn(item.sequence_id, item.num_tokens) for item in step.swap_ins],
        last_reply_no=step.last_reply_no,
        skips_host_prefixes=step.skips_host_prefixes,
    )


KV_STEPS: StreamCodec[KvManagerRequest, KvManagerReply] = StreamCodec(
    method="/octavo.v1.KvManagerService/Steps",
    client=Role.SCHEDULER,
    server=Role.KVMANAGER,
    encode_client=encode_request,
    decode_client=decode_request,
    encode_server=encode_reply,
    decode_server=decode_reply,
)
