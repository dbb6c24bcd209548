"""Strategies for every message of every stream, with all of its fields."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from hypothesis import strategies as st

from octavo.common.messages import generation, kv, step
from octavo.common.messages.token_rules import TokenRules

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
index = st.integers(0, 2**31 - 1)
number = st.integers(0, 2**63 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)
text = st.text(max_size=20)
salt = st.binary(max_size=9)
ids = st.lists(index, max_size=5).map(tuple)
id_array = st.lists(index, max_size=5).map(lambda values: array("i", values))


def drawn(message: Any, /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One with every field, so that none is left at its default."""
    names = (
        [field.name for field in dataclasses.fields(message)] if dataclasses.is_dataclass(message) else message._fields
    )
    assert set(fields) == set(names), (message, set(fields) ^ set(names))
    return st.builds(message, **fields)


def few(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, max_size=3)


token_rules = drawn(
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
params = drawn(
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
    beam_width=index,
    length_penalty=float32,
    early_stopping=st.booleans(),
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


logprobs = drawn(
    generation.TokenLogprobs, sampled=float32, top_token_ids=ids, top_logprobs=st.lists(float32, max_size=3).map(tuple)
)
gateway_message = st.one_of(
    drawn(
        generation.Submit,
        request_no=index,
        request_id=text,
        prompt_token_ids=ids,
        params=params,
        cache_salt=salt,
        priority=int32,
        branch=st.none()
        | drawn(generation.BranchPoint, request_id=text, choice_index=index, num_tokens=st.none() | index),
        keep_s=st.floats(0, 1e9),
        traceparent=text,
        tenant=text,
        weight=st.integers(1, 1000),
        resumed=few(drawn(generation.ResumedChoice, choice_index=index, output_token_ids=ids)).map(tuple),
    ),
    drawn(generation.Abort, request_no=index, choice_index=st.none() | index, num_output_tokens=st.none() | index),
    drawn(generation.Forget, request_id=text, cache_salt=salt),
    drawn(generation.Explain, query_no=index, request_id=text, salt_head=salt),
)
model = drawn(
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
    drawn(generation.Explained, query_no=index, explanation=salt),
    drawn(
        generation.SchedulerStatus,
        ready=st.booleans(),
        reason=text,
        model=st.none() | model,
        is_draining=st.booleans(),
        pool_id=text,
        epoch=st.integers(0, 2**64 - 1),
    ),
    drawn(
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
            drawn(
                generation.RequestStarted,
                request_no=index,
                num_cached_tokens=index,
                num_prompt_tokens=index,
                shared_token_ids=ids,
            )
        ),
        finished=few(
            drawn(
                generation.ChoiceFinished,
                request_no=index,
                choice_index=index,
                reason=st.sampled_from(generation.FinishReason),
                stop_token_id=st.none() | index,
            )
        ),
        failed=few(drawn(generation.RequestFailed, request_no=index, reason=text, message=text)),
        prompt_logprobs=few(prompt_logprobs()),
    ),
)

pair_of_lists = st.lists(st.tuples(index, index), max_size=5)
copy = drawn(kv.BlockCopy, source_id=index, target_id=index, source_generation=index, target_generation=index)
transfer = drawn(
    kv.Transfer,
    transfer_id=uint64,
    direction=st.sampled_from(kv.TransferDirection),
    device_ids=ids,
    generations=ids,
    host_ids=ids,
)
kv_request = st.one_of(
    drawn(
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
        generations=ids,
    ),
    drawn(
        kv.DeclarePool,
        tables=few(
            drawn(
                kv.DeclaredTable,
                sequence_id=uint64,
                token_ids=ids,
                num_computed_tokens=index,
                block_ids=ids,
                generations=ids,
                salt=salt,
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
    drawn(
        kv.KvRequest,
        message_no=uint64,
        acknowledged_step=uint64,
        spent=st.lists(st.tuples(number, index), max_size=5),
        publications=few(drawn(kv.Publication, sequence_id=number, num_computed_tokens=index, new_token_ids=id_array)),
        forks=few(drawn(kv.Fork, parent_id=uint64, child_id=uint64, num_tokens=index, num_table_tokens=index)),
        releases=few(drawn(kv.Release, sequence_id=number, last_step=number)),
        returned_credits=st.lists(index, max_size=5),
        admissions=few(
            drawn(
                kv.Admission,
                sequence_id=uint64,
                token_ids=ids,
                salt=salt,
                computes_itself=st.booleans(),
                num_table_tokens=index,
                ignores_cache=st.booleans(),
            )
        ),
        credit_target=index,
        arrivals=few(
            drawn(
                kv.Arrival,
                sequence_id=uint64,
                token_ids=ids.map(lambda token_ids: array("i", token_ids)),
                salt=salt,
                adapter=text,
                adapter_generation=uint64,
            )
        ),
        finished_transfers=st.lists(number, max_size=5),
        swap_outs=few(drawn(kv.SwapOut, sequence_id=uint64, num_kept_blocks=index, last_step=uint64)),
        swap_ins=few(drawn(kv.SwapIn, sequence_id=uint64, num_tokens=index)),
        last_reply_no=uint64,
        skips_host_prefixes=st.booleans(),
    ),
)
verdict = st.sampled_from(kv.Verdict)
refused = drawn(kv.StreamRefused, reason=text, message=text)
wait_reason = st.sampled_from(kv.WaitReason)
kv_reply = st.one_of(
    refused,
    drawn(kv.PoolOpened, pool_id=text, boot_epoch=uint64, is_resumed=st.booleans(), last_message_no=uint64),
    drawn(
        kv.KvReply,
        message_no=uint64,
        forked=few(
            drawn(
                kv.Forked,
                child_id=uint64,
                verdict=verdict,
                block_ids=ids,
                generations=ids,
                copy=st.none() | copy,
            )
        ),
        admitted=few(
            drawn(
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
                    drawn(kv.PrefixMiss, reason=st.sampled_from(kv.MissReason), num_blocks=index, evicted_by=uint64)
                ).map(tuple),
            )
        ),
        credits=pair_of_lists,
        num_recalled_credits=index,
        counts=drawn(
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
        swapped_out=few(drawn(kv.SwappedOut, sequence_id=uint64, verdict=verdict, transfer_id=uint64)),
        swapped_in=few(
            drawn(
                kv.SwappedIn,
                sequence_id=uint64,
                verdict=verdict,
                transfer_id=uint64,
                block_ids=ids,
                generations=ids,
                wait_reason=wait_reason,
            )
        ),
        transfers=few(transfer),
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
    opened = drawn(
        step.OpenSlot,
        slot=index,
        sequence_id=uint64,
        seeds=st.lists(uint64, max_size=3).map(tuple),
        temperature=float32,
        top_p=float32,
        top_k=index,
        num_logprobs=st.none() | index,
        traceparent=text,
        rules=st.none()
        | drawn(
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
        transfers=draw(few(transfer)),
        acknowledged_step=draw(uint64),
        slots=draw(rows),
        starts=draw(rows),
        lengths=draw(rows),
        flags=draw(st.lists(st.integers(0, 7), min_size=num_rows, max_size=num_rows)),
        token_ids=draw(st.lists(index, max_size=6)),
        groups=draw(few(drawn(step.SharingGroup, slots=ids, num_blocks=index))),
    )


@st.composite
def step_result(draw: st.DrawFn) -> step.StepResult:
    token_ids = draw(st.lists(st.integers(-1, 2**31 - 1), max_size=4))
    entries = [draw(st.none() | logprobs) for _ in token_ids]
    if not any(entries):
        entries = []
    told = draw(few(prompt_logprobs()))
    finished, transfer_us = draw(st.lists(number, max_size=5)), draw(index)
    return step.StepResult(draw(uint64), token_ids, entries, draw(index), draw(index), finished, transfer_us, told)


worker_request = step_plan() | drawn(
    step.WorkerHello, epoch=uint64, resume_incarnation=uint64, last_result=uint64, begins_new_life=st.booleans()
)
worker_reply = st.one_of(
    step_result(),
    drawn(step.StepRefused, step_id=uint64, reason=text, message=text),
    drawn(
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
        num_host_blocks=index,
        is_resumed=st.booleans(),
        last_step=uint64,
        kv_format=text,
        generations=ids,
    ),
)
