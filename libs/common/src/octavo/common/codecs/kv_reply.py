"""Codec of the scheduler-KV manager stream: what the KV manager says, and the pieces that plans carry on."""

from __future__ import annotations

from typing import cast

from google.protobuf.message import DecodeError

from octavo.common.codecs.arrays import pack_int32, unpack_int32
from octavo.common.errors import ProtocolError
from octavo.common.messages.kv import (
    Admitted,
    BlockCopy,
    Forked,
    KvManagerReply,
    KvReply,
    MissReason,
    PoolCounts,
    PoolOpened,
    PrefixMiss,
    StreamRefused,
    SwappedIn,
    SwappedOut,
    Transfer,
    TransferDirection,
    Verdict,
    WaitReason,
)
from octavo.v1 import kvmanager_service_pb2 as pb


def copy_to_proto(copy: BlockCopy) -> pb.BlockCopy:
    return pb.BlockCopy(
        source_id=copy.source_id,
        target_id=copy.target_id,
        source_generation=copy.source_generation,
        target_generation=copy.target_generation,
    )


def copy_from_proto(copy: pb.BlockCopy) -> BlockCopy:
    return BlockCopy(copy.source_id, copy.target_id, copy.source_generation, copy.target_generation)


def transfer_to_proto(transfer: Transfer) -> pb.Transfer:
    return pb.Transfer(
        transfer_id=transfer.transfer_id,
        direction=cast("pb.TransferDirection.ValueType", int(transfer.direction)),
        device_ids=pack_int32(transfer.device_ids),
        generations=pack_int32(transfer.generations),
        host_ids=pack_int32(transfer.host_ids),
    )


def transfer_from_proto(transfer: pb.Transfer) -> Transfer:
    return Transfer(
        transfer_id=transfer.transfer_id,
        direction=TransferDirection(transfer.direction),
        device_ids=tuple(unpack_int32(transfer.device_ids)),
        generations=tuple(unpack_int32(transfer.generations)),
        host_ids=tuple(unpack_int32(transfer.host_ids)),
    )


def counts_to_proto(counts: PoolCounts) -> pb.PoolCounts:
    return pb.PoolCounts(
        free=counts.free,
        granted=counts.granted,
        active=counts.active,
        cached=counts.cached,
        quarantined=counts.quarantined,
        transferring=counts.transferring,
        host_free=counts.host_free,
        host_swapped=counts.host_swapped,
        host_cached=counts.host_cached,
    )


def counts_from_proto(counts: pb.PoolCounts) -> PoolCounts:
    return PoolCounts(
        free=counts.free,
        granted=counts.granted,
        active=counts.active,
        cached=counts.cached,
        quarantined=counts.quarantined,
        transferring=counts.transferring,
        host_free=counts.host_free,
        host_swapped=counts.host_swapped,
        host_cached=counts.host_cached,
    )


def encode_reply(message: KvManagerReply) -> bytes:
    if isinstance(message, KvReply):
        return pb.KvManagerResponse(reply=_reply_to_proto(message)).SerializeToString()
    if isinstance(message, StreamRefused):
        refused = pb.StreamRefused(reason=message.reason, message=message.message)
        return pb.KvManagerResponse(refused=refused).SerializeToString()
    opened = pb.PoolOpened(
        pool_id=message.pool_id,
        boot_epoch=message.boot_epoch,
        is_resumed=message.is_resumed,
        last_message_no=message.last_message_no,
    )
    return pb.KvManagerResponse(pool_opened=opened).SerializeToString()


def decode_reply(body: bytes) -> KvManagerReply:
    try:
        response = pb.KvManagerResponse.FromString(body)
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    match response.WhichOneof("message"):
        case "reply":
            return _reply_from_proto(response.reply)
        case "pool_opened":
            opened = response.pool_opened
            return PoolOpened(opened.pool_id, opened.boot_epoch, opened.is_resumed, opened.last_message_no)
        case "refused":
            return StreamRefused(response.refused.reason, response.refused.message)
    raise ProtocolError("KvManagerResponse with no message set")


def _verdict_to_proto(verdict: Verdict) -> pb.Verdict.ValueType:
    return cast("pb.Verdict.ValueType", int(verdict))


def _wait_to_proto(reason: WaitReason) -> pb.WaitReason.ValueType:
    return cast("pb.WaitReason.ValueType", int(reason))


def _admitted_to_proto(item: Admitted) -> pb.Admitted:
    return pb.Admitted(
        sequence_id=item.sequence_id,
        verdict=_verdict_to_proto(item.verdict),
        num_cached_tokens=item.num_cached_tokens,
        block_ids=pack_int32(item.block_ids),
        generations=pack_int32(item.generations),
        wait_reason=_wait_to_proto(item.wait_reason),
        awaited_sequence_id=item.awaited_sequence_id,
        num_host_tokens=item.num_host_tokens,
        transfer_id=item.transfer_id,
        misses=[
            pb.PrefixMiss(
                reason=cast("pb.MissReason.ValueType", int(miss.reason)),
                num_blocks=miss.num_blocks,
                evicted_by=miss.evicted_by,
            )
            for miss in item.misses
        ],
    )


def _admitted_from_proto(item: pb.Admitted) -> Admitted:
    return Admitted(
        sequence_id=item.sequence_id,
        verdict=Verdict(item.verdict),
        num_cached_tokens=item.num_cached_tokens,
        block_ids=tuple(unpack_int32(item.block_ids)),
        generations=tuple(unpack_int32(item.generations)),
        wait_reason=WaitReason(item.wait_reason),
        awaited_sequence_id=item.awaited_sequence_id,
        num_host_tokens=item.num_host_tokens,
        transfer_id=item.transfer_id,
        misses=tuple([PrefixMiss(MissReason(miss.reason), miss.num_blocks, miss.evicted_by) for miss in item.misses]),
    )


def _reply_to_proto(message: KvReply) -> pb.KvStepReply:
    return pb.KvStepReply(
        message_no=message.message_no,
        forked=[
            pb.Forked(
                child_id=item.child_id,
                verdict=_verdict_to_proto(item.verdict),
                block_ids=pack_int32(item.block_ids),
                generations=pack_int32(item.generations),
                copy=copy_to_proto(item.copy) if item.copy else None,
            )
            for item in message.forked
        ],
        admitted=[_admitted_to_proto(item) for item in message.admitted],
        credit_block_ids=pack_int32([block_id for block_id, _ in message.credits]),
        credit_generations=pack_int32([generation for _, generation in message.credits]),
        num_recalled_credits=message.num_recalled_credits,
        counts=counts_to_proto(message.counts),
        swapped_out=[
            pb.SwappedOut(
                sequence_id=item.sequence_id,
                verdict=_verdict_to_proto(item.verdict),
                transfer_id=item.transfer_id,
            )
            for item in message.swapped_out
        ],
        swapped_in=[
            pb.SwappedIn(
                sequence_id=item.sequence_id,
                verdict=_verdict_to_proto(item.verdict),
                transfer_id=item.transfer_id,
                block_ids=pack_int32(item.block_ids),
                generations=pack_int32(item.generations),
                wait_reason=_wait_to_proto(item.wait_reason),
            )
            for item in message.swapped_in
        ],
        transfers=[transfer_to_proto(item) for item in message.transfers],
    )


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
        admitted=[_admitted_from_proto(item) for item in reply.admitted],
        credits=list(zip(unpack_int32(reply.credit_block_ids), unpack_int32(reply.credit_generations), strict=True)),
        num_recalled_credits=reply.num_recalled_credits,
        counts=counts_from_proto(reply.counts),
        swapped_out=[
            SwappedOut(item.sequence_id, Verdict(item.verdict), item.transfer_id) for item in reply.swapped_out
        ],
        swapped_in=[
            SwappedIn(
                sequence_id=item.sequence_id,
                verdict=Verdict(item.verdict),
                transfer_id=item.transfer_id,
                block_ids=tuple(unpack_int32(item.block_ids)),
                generations=tuple(unpack_int32(item.generations)),
                wait_reason=WaitReason(item.wait_reason),
            )
            for item in reply.swapped_in
        ],
        transfers=[transfer_from_proto(item) for item in reply.transfers],
    )
