"""Every message of every stream survives its encoding; no bytes do worse than being refused."""

from __future__ import annotations

from array import array
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
from octavo.common.messages import generation, kv, step
from octavo.common.messages.token_rules import TokenRules
from octavo.v1 import kvmanager_service_pb2 as pb

STREAMS: list[StreamCodec[Any, Any]] = [GENERATE, KV_STEPS, WORKER_STEPS]

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
index = st.integers(0, 2**31 - 1)
number = st.integers(0, 2**63 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)
text = st.text(max_size=20)
ids = st.lists(index, max_size=5).map(tuple)
id_array = st.lists(index, max_size=5).map(lambda values: array("i", values))


def few(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, max_size=3)


token_rules = st.builds(
    TokenRules,
    grammar=text,
    allowed_token_ids=ids,
    bad_words=few(st.lists(index, max_size=3).map(tuple)).map(tuple),
    min_tokens=index,
    logit_bias=few(st.tuples(index, float32)).map(tuple),
    repetition_penalty=float32,
    frequency_penalty=float32,
    presence_penalty=float32,
    min_p=float32,
    typical_p=float32,
)
params = st.builds(
    generation.SamplingParams,
    max_tokens=index,
    n=index,
    temperature=float32,
    top_p=float32,
    top_k=index,
    seed=uint64,
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
    num_logprobs=st.none() | index,
    rules=st.none() | token_rules,
    num_prompt_logprobs=st.none() | index,
)


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> tuple[int, generation.PromptLogprobs]:
    num_tokens, num_top = draw(st.integers(0, 3)), draw(st.integers(0, 2))

    def some(values: st.SearchStrategy[Any], count: int) -> list[Any]:
        return draw(st.lists(values, min_size=count, max_size=count))

    num_all = num_tokens * num_top
    told = generation.PromptLogprobs(
        draw(index),
        some(float32, num_tokens),
        some(index, num_tokens),
        num_top,
        some(index, num_all),
        some(float32, num_all),
    )
    return draw(index), told


logprobs = st.builds(
    generation.TokenLogprobs, sampled=float32, top_token_ids=ids, top_logprobs=st.lists(float32, max_size=3).map(tuple)
)
gateway_message = st.one_of(
    st.builds(
        generation.Submit,
        request_no=index,
        request_id=text,
        prompt_token_ids=ids,
        params=params,
        cache_salt=st.binary(max_size=9),
        tenant=text,
        weight=st.integers(1, 1000),
        resumed=few(st.builds(generation.ResumedChoice, choice_index=index, output_token_ids=ids)).map(tuple),
    ),
    st.builds(generation.Abort, request_no=index, choice_index=st.none() | index),
    st.builds(generation.Explain, query_no=index, request_id=text),
)
model = st.builds(
    generation.ModelInfo,
    model_name=text,
    max_model_len=index,
    vocab_size=index,
    eos_token_ids=ids,
    max_num_seqs=index,
    block_size=index,
)


@st.composite
def tokens_of_a_batch(draw: st.DrawFn) -> dict[str, Any]:
    tokens = draw(few(st.tuples(index, index, index, st.none() | logprobs)))
    batch = generation.TokenBatch()
    for token in tokens:
        batch.add(*token)
    assert [(t.request_no, t.choice_index, t.token_id, t.logprobs) for t in batch.tokens] == tokens
    return {name: getattr(batch, name) for name in ("request_nos", "choice_indexes", "token_ids", "logprobs")}


scheduler_message = st.one_of(
    st.builds(generation.Explained, query_no=index, explanation=st.binary(max_size=9)),
    st.builds(
        generation.SchedulerStatus,
        ready=st.booleans(),
        reason=text,
        model=st.none() | model,
        is_draining=st.booleans(),
        pool_id=text,
        epoch=st.integers(0, 2**64 - 1),
    ),
    st.builds(
        generation.SchedulerLoad,
        num_waiting=index,
        num_waiting_tokens=st.integers(0, 2**64 - 1),
        num_running=index,
        max_num_running=index,
        num_blocks=index,
        num_available_blocks=index,
        prefill_tokens_per_s=st.floats(0, 1e9),
    ),
    st.builds(
        lambda tokens, **others: generation.TokenBatch(**tokens, **others),
        tokens=tokens_of_a_batch(),
        started=few(
            st.builds(generation.RequestStarted, request_no=index, num_cached_tokens=index, shared_token_ids=ids)
        ),
        finished=few(
            st.builds(
                generation.ChoiceFinished,
                request_no=index,
                choice_index=index,
                reason=st.sampled_from(generation.FinishReason),
                stop_token_id=st.none() | index,
            )
        ),
        failed=few(st.builds(generation.RequestFailed, request_no=index, reason=text, message=text)),
        prompt_logprobs=few(prompt_logprobs()),
    ),
)

pair_of_lists = st.lists(st.tuples(index, index), max_size=5)
copy = st.builds(kv.BlockCopy, source_id=index, target_id=index, source_generation=index, target_generation=index)
kv_request = st.one_of(
    st.builds(
        kv.OpenPool,
        pool_id=text,
        epoch=uint64,
        incarnation=uint64,
        num_blocks=index,
        block_size=index,
        kv_format=text,
        num_host_blocks=index,
        resume_boot_epoch=uint64,
        last_reply_no=uint64,
    ),
    st.builds(
        kv.DeclarePool,
        tables=few(
            st.builds(
                kv.DeclaredTable,
                sequence_id=uint64,
                token_ids=ids,
                num_computed_tokens=index,
                block_ids=ids,
                generations=ids,
                salt=st.binary(max_size=9),
                adapter=text,
                adapter_generation=uint64,
            )
        ),
        credits=pair_of_lists,
        launched_step=uint64,
        acknowledged_step=uint64,
        recycled=pair_of_lists,
        highest_generation=index,
    ),
    st.builds(
        kv.KvRequest,
        message_no=uint64,
        acknowledged_step=uint64,
        spent=st.lists(st.tuples(number, index), max_size=5),
        publications=few(
            st.builds(kv.Publication, sequence_id=number, num_computed_tokens=index, new_token_ids=id_array)
        ),
        forks=few(st.builds(kv.Fork, parent_id=uint64, child_id=uint64, num_tokens=index, num_table_tokens=index)),
        releases=few(st.builds(kv.Release, sequence_id=number, last_step=number)),
        returned_credits=st.lists(index, max_size=5),
        admissions=few(
            st.builds(
                kv.Admission,
                sequence_id=uint64,
                token_ids=ids,
                salt=st.binary(max_size=9),
                computes_itself=st.booleans(),
            )
        ),
        credit_target=index,
        arrivals=few(
            st.builds(
                kv.Arrival,
                sequence_id=uint64,
                token_ids=ids.map(lambda token_ids: array("i", token_ids)),
                salt=st.binary(max_size=9),
                adapter=text,
                adapter_generation=uint64,
            )
        ),
        finished_transfers=st.lists(number, max_size=5),
        swap_outs=few(st.builds(kv.SwapOut, sequence_id=uint64, num_kept_blocks=index, last_step=uint64)),
        swap_ins=few(st.builds(kv.SwapIn, sequence_id=uint64, num_tokens=index)),
        last_reply_no=uint64,
        skips_host_prefixes=st.booleans(),
    ),
)
verdict = st.sampled_from(kv.Verdict)
refused = st.builds(kv.StreamRefused, reason=text, message=text)
wait_reason = st.sampled_from(kv.WaitReason)
kv_reply = st.one_of(
    refused,
    st.builds(kv.PoolOpened, pool_id=text, boot_epoch=uint64, is_resumed=st.booleans(), last_message_no=uint64),
    st.builds(
        kv.KvReply,
        message_no=uint64,
        forked=few(
            st.builds(
                kv.Forked,
                child_id=uint64,
                verdict=verdict,
                block_ids=ids,
                generations=ids,
                copy=st.none() | copy,
            )
        ),
        admitted=few(
            st.builds(
                kv.Admitted,
                sequence_id=uint64,
                verdict=verdict,
                num_cached_tokens=index,
                block_ids=ids,
                generations=ids,
                wait_reason=wait_reason,
                awaited_sequence_id=uint64,
                num_host_tokens=index,
                transfer_id=uint64,
                misses=few(
                    st.builds(kv.PrefixMiss, reason=st.sampled_from(kv.MissReason), num_blocks=index, evicted_by=uint64)
                ).map(tuple),
            )
        ),
        credits=pair_of_lists,
        num_recalled_credits=index,
        counts=st.builds(
            kv.PoolCounts,
            free=index,
            granted=index,
            active=index,
            cached=index,
            quarantined=index,
            transferring=index,
            host_free=index,
            host_swapped=index,
            host_cached=index,
        ),
        swapped_out=few(st.builds(kv.SwappedOut, sequence_id=uint64, verdict=verdict, transfer_id=uint64)),
        swapped_in=few(
            st.builds(
                kv.SwappedIn,
                sequence_id=uint64,
                verdict=verdict,
                transfer_id=uint64,
                block_ids=ids,
                generations=ids,
                wait_reason=wait_reason,
            )
        ),
        transfers=few(
            st.builds(
                kv.Transfer,
                transfer_id=uint64,
                direction=st.sampled_from(kv.TransferDirection),
                device_ids=ids,
                generations=ids,
                host_ids=ids,
            )
        ),
    ),
)


@st.composite
def table_delta(draw: st.DrawFn) -> step.TableDelta:
    block_ids = draw(ids)
    return step.TableDelta(draw(index), draw(index), block_ids, tuple(draw(index) for _ in block_ids))


@st.composite
def step_plan(draw: st.DrawFn) -> step.StepPlan:
    num_rows = draw(st.integers(0, 4))
    rows = st.lists(index, min_size=num_rows, max_size=num_rows)
    opened = st.builds(
        step.OpenSlot,
        slot=index,
        sequence_id=uint64,
        seeds=st.lists(uint64, max_size=3).map(tuple),
        temperature=float32,
        top_p=float32,
        top_k=index,
        num_logprobs=st.none() | index,
        rules=st.none()
        | st.builds(
            step.SlotRules,
            rules=token_rules,
            prompt_token_ids=ids,
            output_token_ids=ids,
            ending_token_ids=ids,
            num_prompt_logprobs=st.none() | index,
        ),
    )
    return step.StepPlan(
        step_id=draw(uint64),
        closed_slots=draw(st.lists(index, max_size=3)),
        opened_slots=draw(few(opened)),
        table_deltas=draw(few(table_delta())),
        copies=draw(few(copy)),
        slots=draw(rows),
        starts=draw(rows),
        lengths=draw(rows),
        flags=draw(st.lists(st.integers(0, 7), min_size=num_rows, max_size=num_rows)),
        token_ids=draw(st.lists(index, max_size=6)),
        groups=draw(few(st.builds(step.SharingGroup, slots=ids, num_blocks=index))),
    )


@st.composite
def step_result(draw: st.DrawFn) -> step.StepResult:
    token_ids = draw(st.lists(st.integers(-1, 2**31 - 1), max_size=4))
    entries = [draw(st.none() | logprobs) for _ in token_ids]
    if not any(entries):
        entries = []
    told = draw(few(prompt_logprobs()))
    return step.StepResult(draw(uint64), token_ids, entries, draw(index), draw(index), prompt_logprobs=told)


worker_request = st.builds(step.WorkerHello, epoch=uint64) | step_plan()
worker_reply = st.one_of(
    step_result(),
    st.builds(step.StepRefused, step_id=uint64, reason=text, message=text),
    st.builds(
        step.WorkerReady,
        incarnation=uint64,
        model_name=text,
        num_blocks=index,
        block_size=index,
        max_num_seqs=index,
        max_num_batched_tokens=index,
        max_model_len=index,
        vocab_size=index,
        eos_token_ids=ids,
        kv_format=text,
    ),
)


@given(gateway_message)
def test_gateway_messages_survive(message: generation.GatewayMessage) -> None:
    assert GENERATE.decode_client(GENERATE.encode_client(message)) == message


@given(scheduler_message)
def test_scheduler_messages_survive(message: generation.SchedulerMessage) -> None:
    assert GENERATE.decode_server(GENERATE.encode_server(message)) == message


@given(kv_request)
def test_kv_manager_requests_survive(message: kv.KvManagerRequest) -> None:
    assert KV_STEPS.decode_client(KV_STEPS.encode_client(message)) == message


@given(kv_reply)
def test_kv_manager_replies_survive(message: kv.KvManagerReply) -> None:
    assert KV_STEPS.decode_server(KV_STEPS.encode_server(message)) == message


@given(worker_request)
def test_worker_requests_survive(message: step.WorkerRequest) -> None:
    assert WORKER_STEPS.decode_client(WORKER_STEPS.encode_client(message)) == message


@given(worker_reply)
def test_worker_replies_survive(message: step.WorkerReply) -> None:
    assert WORKER_STEPS.decode_server(WORKER_STEPS.encode_server(message)) == message


@given(body=st.binary(max_size=200))
def test_garbage_is_refused_or_read_but_nothing_worse(body: bytes) -> None:
    for stream in STREAMS:
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


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.method)
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
