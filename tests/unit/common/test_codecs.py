"""Every message of every stream survives its encoding; no bytes do worse than being refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.common.codecs.arrays import (
    pack_float32,
    pack_float64,
    pack_int32,
    pack_int64,
    unpack_float32,
    unpack_float64,
    unpack_int32,
    unpack_int64,
)
from octavo.common.codecs.generation import GENERATE
from octavo.common.codecs.kv import KV_STEPS
from octavo.common.codecs.step import WORKER_STEPS
from octavo.common.errors import ProtocolError
from octavo.common.links import StreamCodec
from octavo.common.messages import generation, kv
from octavo.v1 import kvmanager_service_pb2 as pb
from support.drawn_messages import (
    float32,
    gateway_message,
    int32,
    int64,
    kv_reply,
    kv_request,
    scheduler_message,
    worker_reply,
    worker_request,
)

DRAWN: dict[StreamCodec[Any, Any], tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]] = {
    GENERATE: (gateway_message, scheduler_message),
    KV_STEPS: (kv_request, kv_reply),
    WORKER_STEPS: (worker_request, worker_reply),
}
"""What clients and servers of each stream send."""


@pytest.mark.parametrize("stream", DRAWN, ids=lambda stream: stream.method)
@given(data=st.data())
def test_every_message_survives(stream: StreamCodec[Any, Any], data: st.DataObject) -> None:
    requests, replies = DRAWN[stream]
    request, reply = data.draw(requests), data.draw(replies)
    assert stream.decode_client(stream.encode_client(request)) == request
    assert stream.decode_server(stream.encode_server(reply)) == reply


@given(body=st.binary(max_size=200))
def test_garbage_is_refused_or_read_but_nothing_worse(body: bytes) -> None:
    for stream in DRAWN:
        for decode in (stream.decode_client, stream.decode_server):
            try:
                decode(body)
            except (ProtocolError, ValueError):
                continue


@given(message=kv_request, data=st.data())
def test_a_damaged_message_is_refused_or_read_but_nothing_worse(
    message: kv.KvManagerRequest, data: st.DataObject
) -> None:
    body = bytearray(KV_STEPS.encode_client(message))
    if body:
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        KV_STEPS.decode_client(bytes(body[: data.draw(st.integers(0, len(body)))]))
    except (ProtocolError, ValueError):
        return


def test_columns_that_do_not_fit_together_are_refused() -> None:
    tokens = generation.TokenBatch(request_nos=[1, 2], choice_indexes=[0, 0], token_ids=[7])
    with pytest.raises(ProtocolError, match="differ in length"):
        GENERATE.decode_server(GENERATE.encode_server(tokens))
    stray = generation.TokenBatch([], [1], [0], [7], {1: generation.TokenLogprobs(0.0, (), ())})
    with pytest.raises(ProtocolError, match="token 1, and there are 1"):
        GENERATE.decode_server(GENERATE.encode_server(stray))
    step_message = pb.KvStep(
        published_sequence_ids=pack_int64([1]),
        published_num_computed_tokens=pack_int32([16]),
        published_num_new_tokens=pack_int32([2]),
        published_new_token_ids=pack_int32([5]),
    )
    with pytest.raises(ProtocolError, match="1 published tokens"):
        KV_STEPS.decode_client(pb.KvManagerRequest(step=step_message).SerializeToString())


@pytest.mark.parametrize("stream", DRAWN, ids=lambda stream: stream.method)
def test_an_empty_body_is_refused(stream: StreamCodec[Any, Any]) -> None:
    for decode in (stream.decode_client, stream.decode_server):
        with pytest.raises(ProtocolError, match="no message set"):
            decode(b"")


@given(st.lists(int32), st.lists(int64), st.lists(float32))
def test_arrays_survive(int32s: list[int], int64s: list[int], float32s: list[float]) -> None:
    assert unpack_int32(pack_int32(int32s)) == int32s
    assert unpack_int64(pack_int64(int64s)) == int64s
    assert unpack_float32(pack_float32(float32s)) == float32s
    assert unpack_float64(pack_float64(float32s)) == float32s


def test_arrays_are_little_endian() -> None:
    assert pack_int32([1, -1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert pack_int64([258]) == b"\x02\x01\x00\x00\x00\x00\x00\x00"


def test_a_broken_array_is_refused() -> None:
    with pytest.raises(ProtocolError, match="5 bytes"):
        unpack_int32(b"12345")
