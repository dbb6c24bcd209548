"""Codec of the gateway-scheduler stream."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from google.protobuf.message import DecodeError

from octavo.common.codecs.arrays import pack_float32, pack_int32, unpack_float32, unpack_int32
from octavo.common.codecs.token_rules import rules_from_proto, rules_to_proto
from octavo.common.errors import ProtocolError
from octavo.common.links.link import StreamCodec
from octavo.common.messages.generation import (
    Abort,
    BranchPoint,
    ChoiceFinished,
    Explain,
    Explained,
    FinishReason,
    Forget,
    GatewayMessage,
    ModelInfo,
    PromptLogprobs,
    RequestFailed,
    RequestStarted,
    ResumedChoice,
    SamplingParams,
    SchedulerLoad,
    SchedulerMessage,
    SchedulerStatus,
    Submit,
    TokenBatch,
    TokenLogprobs,
)
from octavo.common.roles import Role
from octavo.v1 import scheduler_service_pb2 as pb

_NUM_COLUMNS = 3
"""Fields of a batch that are there if it has tokens."""


def _params_to_proto(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=params.max_tokens,
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop_token_ids=pack_int32(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        rules=rules_to_proto(params.rules) if params.rules is not None else None,
        num_prompt_logprobs=params.num_prompt_logprobs,
    )


def _params_from_proto(params: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens,
        n=params.n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop_token_ids=tuple(unpack_int32(params.stop_token_ids)),
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        rules=rules_from_proto(params.rules) if params.HasField("rules") else None,
        num_prompt_logprobs=params.num_prompt_logprobs if params.HasField("num_prompt_logprobs") else None,
    )


def _branch_to_proto(branch: BranchPoint) -> pb.BranchPoint:
    return pb.BranchPoint(request_id=branch.request_id, choice_index=branch.choice_index, num_tokens=branch.num_tokens)


def _branch_from_proto(branch: pb.BranchPoint) -> BranchPoint:
    num_tokens = branch.num_tokens if branch.HasField("num_tokens") else None
    return BranchPoint(branch.request_id, branch.choice_index, num_tokens)


def encode_gateway(message: GatewayMessage) -> bytes:
    if isinstance(message, Submit):
        submit = pb.Submit(
            request_no=message.request_no,
            request_id=message.request_id,
            prompt_token_ids=pack_int32(message.prompt_token_ids),
            params=_params_to_proto(message.params),
            cache_salt=message.cache_salt,
            priority=message.priority,
            tenant=message.tenant,
            weight=message.weight,
            branch=_branch_to_proto(message.branch) if message.branch else None,
            keep_s=message.keep_s,
            traceparent=message.traceparent,
            resumed=[
                pb.ResumedChoice(choice_index=choice.choice_index, output_token_ids=pack_int32(choice.output_token_ids))
                for choice in message.resumed
            ],
        )
        return pb.GenerateRequest(submit=submit).SerializeToString()
    if isinstance(message, Forget):
        forget = pb.Forget(request_id=message.request_id, cache_salt=message.cache_salt)
        return pb.GenerateRequest(forget=forget).SerializeToString()
    if isinstance(message, Explain):
        explain = pb.Explain(query_no=message.query_no, request_id=message.request_id, salt_head=message.salt_head)
        return pb.GenerateRequest(explain=explain).SerializeToString()
    abort = pb.Abort(
        request_no=message.request_no,
        choice_index=message.choice_index,
        num_output_tokens=message.num_output_tokens,
    )
    return pb.GenerateRequest(abort=abort).SerializeToString()


def decode_gateway(body: bytes) -> GatewayMessage:
    try:
        request = pb.GenerateRequest.FromString(body)
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    match request.WhichOneof("message"):
        case "submit":
            submit = request.submit
            return Submit(
                request_no=submit.request_no,
                request_id=submit.request_id,
                prompt_token_ids=tuple(unpack_int32(submit.prompt_token_ids)),
                params=_params_from_proto(submit.params),
                cache_salt=submit.cache_salt,
                priority=submit.priority,
                tenant=submit.tenant,
                weight=submit.weight or 1,
                branch=_branch_from_proto(submit.branch) if submit.HasField("branch") else None,
                keep_s=submit.keep_s,
                traceparent=submit.traceparent,
                resumed=tuple(
                    ResumedChoice(choice.choice_index, tuple(unpack_int32(choice.output_token_ids)))
                    for choice in submit.resumed
                ),
            )
        case "abort":
            abort = request.abort
            return Abort(
                abort.request_no,
                abort.choice_index if abort.HasField("choice_index") else None,
                abort.num_output_tokens if abort.HasField("num_output_tokens") else None,
            )
        case "forget":
            return Forget(request.forget.request_id, request.forget.cache_salt)
        case "explain":
            return Explain(request.explain.query_no, request.explain.request_id, request.explain.salt_head)
    raise ProtocolError("GenerateRequest with no message set")


def logprobs_to_proto(index: int, logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    """`index` is the place of the token in the list that the message carries."""
    return pb.TokenLogprobs(
        token_index=index,
        sampled=logprobs.sampled,
        top_token_ids=pack_int32(logprobs.top_token_ids),
        top_logprobs=pack_float32(logprobs.top_logprobs),
    )


def logprobs_from_proto(logprobs: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        sampled=logprobs.sampled,
        top_token_ids=tuple(unpack_int32(logprobs.top_token_ids)),
        top_logprobs=tuple(unpack_float32(logprobs.top_logprobs)),
    )


def prompt_logprobs_to_proto(owner: int, told: PromptLogprobs) -> pb.PromptLogprobs:
    """`owner` is the row or the request."""
    return pb.PromptLogprobs(
        owner=owner,
        start=told.start,
        logprobs=pack_float32(told.logprobs),
        ranks=pack_int32(told.ranks),
        num_top=told.num_top,
        top_token_ids=pack_int32(told.top_token_ids),
        top_logprobs=pack_float32(told.top_logprobs),
    )


def prompt_logprobs_from_proto(told: pb.PromptLogprobs) -> tuple[int, PromptLogprobs]:
    """Raises ProtocolError if the arrays do not fit one another."""
    found = PromptLogprobs(
        told.start,
        unpack_float32(told.logprobs),
        unpack_int32(told.ranks),
        told.num_top,
        unpack_int32(told.top_token_ids),
        unpack_float32(told.top_logprobs),
    )
    num_tokens = len(found.logprobs)
    lengths = (len(found.ranks), len(found.top_token_ids), len(found.top_logprobs))
    if lengths != (num_tokens, num_tokens * found.num_top, num_tokens * found.num_top):
        raise ProtocolError("log-probabilities of a prompt differ in length")
    return told.owner, found


def encode_scheduler(message: SchedulerMessage) -> bytes:
    if isinstance(message, SchedulerStatus):
        return pb.GenerateResponse(status=_status_to_proto(message)).SerializeToString()
    if isinstance(message, Explained):
        explained = pb.Explained(query_no=message.query_no, explanation=message.explanation)
        return pb.GenerateResponse(explained=explained).SerializeToString()
    if isinstance(message, SchedulerLoad):
        return pb.GenerateResponse(load=pb.SchedulerLoad(**asdict(message))).SerializeToString()
    return pb.GenerateResponse(tokens=_tokens_to_proto(message)).SerializeToString()


def decode_scheduler(body: bytes) -> SchedulerMessage:
    try:
        response = pb.GenerateResponse.FromString(body)
    except DecodeError as error:
        raise ProtocolError(str(error)) from error
    match response.WhichOneof("message"):
        case "tokens":
            return _tokens_from_proto(response.tokens)
        case "status":
            return _status_from_proto(response.status)
        case "explained":
            return Explained(response.explained.query_no, response.explained.explanation)
        case "load":
            return _load_from_proto(response.load)
    raise ProtocolError("GenerateResponse with no message set")


def _status_to_proto(status: SchedulerStatus) -> pb.SchedulerStatus:
    return pb.SchedulerStatus(
        ready=status.ready,
        reason=status.reason,
        model=_model_to_proto(status.model) if status.model else None,
        pool_id=status.pool_id,
        epoch=status.epoch,
        is_draining=status.is_draining,
    )


def _model_to_proto(model: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(
        model_name=model.model_name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=pack_int32(model.eos_token_ids),
        max_num_seqs=model.max_num_seqs,
        block_size=model.block_size,
    )


def _status_from_proto(status: pb.SchedulerStatus) -> SchedulerStatus:
    model = None
    if status.HasField("model"):
        model = ModelInfo(
            model_name=status.model.model_name,
            max_model_len=status.model.max_model_len,
            vocab_size=status.model.vocab_size,
            eos_token_ids=tuple(unpack_int32(status.model.eos_token_ids)),
            max_num_seqs=status.model.max_num_seqs,
            block_size=status.model.block_size,
        )
    return SchedulerStatus(
        status.ready, status.reason, model, status.is_draining, pool_id=status.pool_id, epoch=status.epoch
    )


def _load_from_proto(load: pb.SchedulerLoad) -> SchedulerLoad:
    return SchedulerLoad(
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        num_running=load.num_running,
        max_num_running=load.max_num_running,
        num_blocks=load.num_blocks,
        num_available_blocks=load.num_available_blocks,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
    )


def _tokens_to_proto(batch: TokenBatch) -> pb.TokenBatch:
    return pb.TokenBatch(
        started=[
            pb.RequestStarted(
                request_no=started.request_no,
                num_cached_tokens=started.num_cached_tokens,
                num_prompt_tokens=started.num_prompt_tokens,
                shared_token_ids=pack_int32(started.shared_token_ids),
            )
            for started in batch.started
        ],
        token_request_nos=pack_int32(batch.request_nos),
        token_choice_indexes=pack_int32(batch.choice_indexes),
        token_ids=pack_int32(batch.token_ids),
        logprobs=[logprobs_to_proto(place, logprobs) for place, logprobs in batch.logprobs.items()],
        finished=[
            pb.ChoiceFinished(
                request_no=end.request_no,
                choice_index=end.choice_index,
                reason=cast("pb.FinishReason.ValueType", int(end.reason)),
                stop_token_id=end.stop_token_id,
            )
            for end in batch.finished
        ],
        failed=[pb.RequestFailed(request_no=f.request_no, reason=f.reason, message=f.message) for f in batch.failed],
        prompt_logprobs=[prompt_logprobs_to_proto(*told) for told in batch.prompt_logprobs],
    )


def _tokens_from_proto(batch: pb.TokenBatch) -> TokenBatch:
    request_nos, choice_indexes = unpack_int32(batch.token_request_nos), unpack_int32(batch.token_choice_indexes)
    token_ids = unpack_int32(batch.token_ids)
    if not len(request_nos) == len(choice_indexes) == len(token_ids):
        raise ProtocolError("the columns of a token batch differ in length")
    tokens = TokenBatch([], request_nos, choice_indexes, token_ids)
    # Most batches have columns only, and asking for each of the other fields would take longer than reading these.
    if len(batch.ListFields()) > (_NUM_COLUMNS if token_ids else 0):
        _add_news(tokens, batch)
    return tokens


def _add_news(tokens: TokenBatch, batch: pb.TokenBatch) -> None:
    tokens.started.extend(map(_started_from_proto, batch.started))
    tokens.logprobs.update((entry.token_index, logprobs_from_proto(entry)) for entry in batch.logprobs)
    if tokens.logprobs and (last := max(tokens.logprobs)) >= len(tokens.token_ids):
        raise ProtocolError(f"log-probabilities of token {last}, and there are {len(tokens.token_ids)}")
    tokens.finished.extend(map(_finished_from_proto, batch.finished))
    tokens.failed.extend(RequestFailed(f.request_no, f.reason, f.message) for f in batch.failed)
    tokens.prompt_logprobs.extend(map(prompt_logprobs_from_proto, batch.prompt_logprobs))


def _started_from_proto(started: pb.RequestStarted) -> RequestStarted:
    shared_token_ids = tuple(unpack_int32(started.shared_token_ids))
    return RequestStarted(started.request_no, started.num_cached_tokens, started.num_prompt_tokens, shared_token_ids)


def _finished_from_proto(end: pb.ChoiceFinished) -> ChoiceFinished:
    stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
    return ChoiceFinished(end.request_no, end.choice_index, FinishReason(end.reason), stop_token_id)


GENERATE: StreamCodec[GatewayMessage, SchedulerMessage] = StreamCodec(
    method="/octavo.v1.SchedulerService/Generate",
    client=Role.GATEWAY,
    server=Role.SCHEDULER,
    encode_client=encode_gateway,
    decode_client=decode_gateway,
    encode_server=encode_scheduler,
    decode_server=decode_scheduler,
)
