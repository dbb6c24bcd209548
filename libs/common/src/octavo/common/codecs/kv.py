"""Codec of the scheduler-KV manager stream."""

from __future__ import annotations

from typing import cast

from google.protobuf.message import DecodeError

from octavo.common.codecs.arrays import pack_int32, pack_int64, unpack_int32, unpack_int64
from octavo.common.errors import ProtocolError
from octavo.common.links.link import StreamCodec
from octavo.common.messages.kv import (
    Admission,
    Admitted,
    BlockCopy,
    Fork,
    Forked,
    KvManagerReply,
    KvManagerRequest,
    KvReply,
    KvRequest,
    OpenPool,
    PoolCounts,
    PoolOpened,
    Publication,
    Release,
    Verdict,
)
from octavo.v1 import kvmanager_service_pb2 as pb


def encode_request(message: KvManagerRequest) -> bytes:
    if isinstance(message, OpenPool):
        opening = pb.OpenPool(
            pool_id=message.pool_id,
            epoch=message.epoch,
            incarnation=message.incarnation,
            num_blocks=message.num_blocks,
            block_size=message.block_size,
        )
        return pb.KvManagerRequest(open_pool=opening).SerializeToString()
    step = pb.KvStep(
        message_no=message.message_no,
        acknowledged_step=message.acknowledged_step,
        spent_sequence_ids=pack_int64([sequence_id for sequence_id, _ in message.spent]),
        spent_block_ids=pack_int32([block_id for _, block_id in message.spent]),
        publications=[
            pb.Publication(
                sequence_id=item.sequence_id,
                num_computed_tokens=item.num_computed_tokens,
                new_token_ids=pack_int32(item.new_token_ids),
            )
            for item in message.publications
        ],
        forks=[pb.Fork(parent_id=f.parent_id, child_id=f.child_id, num_tokens=f.num_tokens) for f in message.forks],
        released_sequence_ids=pack_int64([release.sequence_id for release in message.releases]),
        released_last_steps=pack_int64([release.last_step for release in message.releases]),
        returned_credits=pack_int32(message.returned_credits),
        admissions=[
            pb.Admission(sequence_id=item.sequence_id, token_ids=pack_int32(item.token_ids), salt=item.salt)
            for item in message.admissions
        ],
        credit_target=message.credit_target,
    )
    return pb.KvManagerRequest(step=step).SerializeToString()


def decode_request(body: bytes) -> KvManagerRequest:
    try:
        request = pb.KvManagerRequest.FromString(body)
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    match request.WhichOneof("message"):
        case "open_pool":
            opening = request.open_pool
            return OpenPool(
                pool_id=opening.pool_id,
                epoch=opening.epoch,
                incarnation=opening.incarnation,
                num_blocks=opening.num_blocks,
                block_size=opening.block_size,
            )
        case "step":
            return _step_from_proto(request.step)
    raise ProtocolError("KvManagerRequest with no message set")


def _step_from_proto(step: pb.KvStep) -> KvRequest:
    return KvRequest(
        message_no=step.message_no,
        acknowledged_step=step.acknowledged_step,
        spent=list(zip(unpack_int64(step.spent_sequence_ids), unpack_int32(step.spent_block_ids), strict=True)),
        publications=[
            Publication(item.sequence_id, item.num_computed_tokens, tuple(unpack_int32(item.new_token_ids)))
            for item in step.publications
        ],
        forks=[Fork(item.parent_id, item.child_id, item.num_tokens) for item in step.forks],
        releases=[
            Release(sequence_id, last_step)
            for sequence_id, last_step in zip(
                unpack_int64(step.released_sequence_ids), unpack_int64(step.released_last_steps), strict=True
            )
        ],
        returned_credits=unpack_int32(step.returned_credits),
        admissions=[
            Admission(item.sequence_id, tuple(unpack_int32(item.token_ids)), item.salt) for item in step.admissions
        ],
        credit_target=step.credit_target,
    )


def copy_to_proto(copy: BlockCopy) -> pb.BlockCopy:
    return pb.BlockCopy(source_id=copy.source_id, target_id=copy.target_id)


def copy_from_proto(copy: pb.BlockCopy) -> BlockCopy:
    return BlockCopy(copy.source_id, copy.target_id)


def counts_to_proto(counts: PoolCounts) -> pb.PoolCounts:
    return pb.PoolCounts(
        free=counts.free,
        granted=counts.granted,
        active=counts.active,
        cached=counts.cached,
        quarantined=counts.quarantined,
    )


def counts_from_proto(counts: pb.PoolCounts) -> PoolCounts:
    return PoolCounts(
        free=counts.free,
        granted=counts.granted,
        active=counts.active,
        cached=counts.cached,
        quarantined=counts.quarantined,
    )


def encode_reply(message: KvManagerReply) -> bytes:
    if isinstance(message, PoolOpened):
        opened = pb.PoolOpened(pool_id=message.pool_id, boot_epoch=message.boot_epoch)
        return pb.KvManagerResponse(pool_opened=opened).SerializeToString()
    reply = pb.KvStepReply(
        message_no=message.message_no,
        forked=[
            pb.Forked(
                child_id=item.child_id,
                verdict=cast("pb.Verdict.ValueType", int(item.verdict)),
                block_ids=pack_int32(item.block_ids),
                generations=pack_int32(item.generations),
                copy=copy_to_proto(item.copy) if item.copy else None,
            )
            for item in message.forked
        ],
        admitted=[
            pb.Admitted(
                sequence_id=item.sequence_id,
                verdict=cast("pb.Verdict.ValueType", int(item.verdict)),
                num_cached_tokens=item.num_cached_tokens,
                block_ids=pack_int32(item.block_ids),
                generations=pack_int32(item.generations),
            )
            for item in message.admitted
        ],
        credit_block_ids=pack_int32([block_id for block_id, _ in message.credits]),
        credit_generations=pack_int32([generation for _, generation in message.credits]),
        num_recalled_credits=message.num_recalled_credits,
        counts=counts_to_proto(message.counts),
    )
    return pb.KvManagerResponse(reply=reply).SerializeToString()


def decode_reply(body: bytes) -> KvManagerReply:
    try:
        response = pb.KvManagerResponse.FromString(body)
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    match response.WhichOneof("message"):
        case "pool_opened":
            return PoolOpened(response.pool_opened.pool_id, response.pool_opened.boot_epoch)
        case "reply":
            return _reply_from_proto(response.reply)
    raise ProtocolError("KvManagerResponse with no message set")


def _reply_from_proto(reply: pb.KvStepReply) -> KvReply:
    return KvReply(
        message_no=reply.message_no,
        forked=[
            Forked(
                child_id=item.child_id,
                verdict=Verdict(item.verdict),
                block_ids=tuple(unpack_int32(item.block_ids)),
                generations=tuple(unpack_int32(item.generations)),
                copy=copy_from_proto(item.copy) if item.HasField("copy") else None,
            )
            for item in reply.forked
        ],
        admitted=[
            Admitted(
                sequence_id=item.sequence_id,
                verdict=Verdict(item.verdict),
                num_cached_tokens=item.num_cached_tokens,
                block_ids=tuple(unpack_int32(item.block_ids)),
                generations=tuple(unpack_int32(item.generations)),
            )
            for item in reply.admitted
        ],
        credits=list(zip(unpack_int32(reply.credit_block_ids), unpack_int32(reply.credit_generations), strict=True)),
        num_recalled_credits=reply.num_recalled_credits,
        counts=counts_from_proto(reply.counts),
    )


KV_STEPS: StreamCodec[KvManagerRequest, KvManagerReply] = StreamCodec(
    method="/octavo.v1.KvManagerService/Steps",
    encode_client=encode_request,
    decode_client=decode_request,
    encode_server=encode_reply,
    decode_server=decode_reply,
)
