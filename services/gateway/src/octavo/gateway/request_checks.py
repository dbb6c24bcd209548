"""Checks that need the model or the limits, from a parsed body to what the scheduler is asked for."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from octavo.common.errors import NotReadyError, PromptTooLongError, UnknownModelError
from octavo.common.messages.generation import BranchPoint, ModelInfo, SamplingParams
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError
from octavo.gateway.limits import at_most
from octavo.gateway.openai_schema import ChatRequest, CompletionRequest, GenerationRequest
from octavo.gateway.request_part import Prompt
from octavo.gateway.response_ids import request_id_of
from octavo.gateway.search_options import search_options
from octavo.gateway.token_ids import check_token_ids
from octavo.gateway.token_rules import LEAST_SHARE, token_rules
from octavo.gateway.tokenization import ModelTokenizer
from octavo.gateway.worker_groups import WorkerGroups

DEFAULT_COMPLETION_TOKENS = 16
_LOWEST_TEMPERATURE = 1e-4

PromptInput = str | list[int]


def served_model(client: WorkerGroups, name: str | None) -> ModelInfo:
    """The model of a request. Raises NotReadyError and UnknownModelError."""
    model = client.model
    if model is None or client.why_refused:
        raise NotReadyError(client.why_refused)
    if name is not None and name != model.model_name:
        raise UnknownModelError(f"the model {name!r} does not exist; this server has {model.model_name!r}")
    return model


def parse_prompts(
    value: Any, config: GatewayConfig, model: ModelInfo, *, may_be_empty: bool = False, may_be_long: bool = False
) -> list[PromptInput]:
    """The prompts of a completion: a text, ids, or a list of either. Raises FieldError that names the position.

    `may_be_long`: ids may exceed the model's length, since they are cut later.
    """
    max_len = model.max_model_len if not may_be_long else config.max_body_bytes
    if may_be_empty and (value is None or value == "" or value == []):
        return [[]]
    if value is None:
        raise FieldError("prompt", "prompt: is missing", "missing_required_parameter")
    if isinstance(value, str):
        return [_checked_text(value, "prompt")]
    if not isinstance(value, list):
        raise FieldError("prompt", "prompt: must be a text, a list of token ids, or a list of either", "invalid_value")
    if not value:
        raise FieldError("prompt", "prompt: must not be empty", "invalid_value")
    if not isinstance(value[0], str | list):
        return [_checked_ids(value, "prompt", model, max_len)]
    if len(value) > config.max_prompts:
        raise FieldError("prompt", f"prompt: has {len(value)} prompts, at most {config.max_prompts} are allowed")
    kind = type(value[0])
    for index, prompt in enumerate(value):
        if type(prompt) is not kind:
            raise FieldError(f"prompt[{index}]", f"prompt[{index}]: is of another kind than prompt[0]", "invalid_value")
    if kind is str:
        return [_checked_text(prompt, f"prompt[{index}]") for index, prompt in enumerate(value)]
    return [_checked_ids(prompt, f"prompt[{index}]", model, max_len) for index, prompt in enumerate(value)]


def _checked_text(text: str, param: str) -> str:
    if not text:
        raise FieldError(param, f"{param}: must not be empty", "invalid_value")
    return text


def _checked_ids(ids: list[Any], param: str, model: ModelInfo, max_len: int) -> list[int]:
    if not ids:
        raise FieldError(param, f"{param}: must not be empty", "invalid_value")
    if len(ids) >= max_len:
        raise PromptTooLongError(
            f"this model's maximum context length is {model.max_model_len} tokens, but {param} has {len(ids)}, "
            "and at least one is generated"
        )
    check_token_ids(ids, param, model.vocab_size)
    return ids


@dataclass(frozen=True, slots=True)
class CheckedOptions:
    """The options of a request, before its prompts are token ids."""

    params: SamplingParams
    """`max_tokens` is 0 where the request leaves it to the default; the seed is 0 where it gives none."""
    default_max_tokens: int | None
    """None: as many as fit."""
    has_seed: bool
    stops: tuple[str, ...]
    wants_logprobs: bool
    num_returned: int
    """Choices per prompt in the answer: the best of `params.n`."""
    branch: BranchPoint | None
    keep_s: float
    priority: int
    truncate_prompt_tokens: int | None
    """-1: to what fits."""


def check_options(
    request: CompletionRequest | ChatRequest,
    num_prompts: int,
    config: GatewayConfig,
    model: ModelInfo,
    tokenizer: ModelTokenizer,
) -> CheckedOptions:
    """Everything that can be refused before a prompt is tokenized. Raises FieldError."""
    if request.stream_options is not None and not request.stream:
        raise FieldError("stream_options", "stream_options: is only allowed with stream", "invalid_value")
    if isinstance(request, CompletionRequest):
        num_logprobs, max_tokens = request.logprobs, _completion_max_tokens(request)
        at_most("logprobs", num_logprobs or 0, config.max_logprobs)
    else:
        num_logprobs, max_tokens = _chat_logprobs(request, config), _chat_max_tokens(request)
    n = request.n or 1
    at_most("n", n, config.max_n)
    search = search_options(request, n, config)
    param = "n" if search.num_generated == n else "best_of"
    at_most(param, search.num_generated * num_prompts, config.max_choices, "choices over all prompts")
    at_most("keep", request.keep or 0, config.max_keep_s, "seconds")
    at_most("timeout", request.timeout or 0, config.max_timeout_s, "seconds")
    if abs(request.priority or 0) > config.max_priority:
        message = f"priority: {request.priority} is not from -{config.max_priority} to {config.max_priority}"
        raise FieldError("priority", message)
    if request.truncate_prompt_tokens == 0:
        raise FieldError("truncate_prompt_tokens", "truncate_prompt_tokens: must not be 0", "invalid_value")
    if max_tokens is not None and max_tokens > model.max_model_len:
        raise PromptTooLongError(
            f"this model's maximum context length is {model.max_model_len} tokens, but max_tokens is {max_tokens}"
        )
    default_temperature = 0.0 if search.beam_width else 1.0
    temperature = default_temperature if request.temperature is None else float(request.temperature)
    wants_logprobs = num_logprobs is not None
    if search.num_generated > n and num_logprobs is None:
        num_logprobs = 0
    params = SamplingParams(
        max_tokens=max_tokens or 0,
        n=search.num_generated,
        temperature=temperature if temperature >= _LOWEST_TEMPERATURE else 0.0,
        top_p=1.0 if request.top_p is None else max(float(request.top_p), LEAST_SHARE),
        top_k=max(request.top_k or 0, 0),
        seed=(request.seed or 0) % 2**64,
        stop_token_ids=_stop_token_ids(request, config, model),
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs,
        beam_width=search.beam_width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        rules=token_rules(request, config, model, tokenizer),
        num_prompt_logprobs=_prompt_logprobs(request, config),
    )
    default = DEFAULT_COMPLETION_TOKENS if isinstance(request, CompletionRequest) else None
    return CheckedOptions(
        params,
        default,
        request.seed is not None,
        _stops(request, config),
        wants_logprobs,
        num_returned=n,
        branch=_branch_point(request),
        keep_s=float(request.keep or 0),
        priority=request.priority or 0,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )


def _branch_point(request: CompletionRequest | ChatRequest) -> BranchPoint | None:
    branch = request.branch if isinstance(request, CompletionRequest) else None
    return BranchPoint(request_id_of(branch.id), branch.choice, branch.num_tokens) if branch else None


def _chat_logprobs(request: ChatRequest, config: GatewayConfig) -> int | None:
    if request.top_logprobs is not None and not request.logprobs:
        raise FieldError("top_logprobs", "top_logprobs: is only allowed with logprobs", "invalid_value")
    at_most("top_logprobs", request.top_logprobs or 0, config.max_logprobs)
    return (request.top_logprobs or 0) if request.logprobs else None


def _prompt_logprobs(request: CompletionRequest | ChatRequest, config: GatewayConfig) -> int | None:
    """What the request asks for, by itself or by an echo with log-probabilities."""
    count = request.prompt_logprobs
    at_most("prompt_logprobs", count or 0, config.max_logprobs)
    if count is not None and request.stream:
        raise FieldError("prompt_logprobs", "prompt_logprobs: is not offered in a stream", "invalid_value")
    has_branch = isinstance(request, CompletionRequest) and request.branch is not None
    if count is not None and (has_branch or request.use_beam_search):
        message = "prompt_logprobs: is not offered with branch or beam search"
        raise FieldError("prompt_logprobs", message, "invalid_value")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        if request.use_beam_search:
            raise FieldError("echo", "echo: is not offered with logprobs of a beam search", "invalid_value")
        return max(count or 0, request.logprobs)
    return count


def _completion_max_tokens(request: CompletionRequest) -> int | None:
    """The scheduler is asked for one token where the answer has none."""
    if request.max_tokens == 0 and not request.echo:
        raise FieldError("max_tokens", "max_tokens: is 0, which is only allowed with echo", "invalid_value")
    if request.echo and request.branch is not None:
        raise FieldError("echo", "echo: is not offered with branch", "invalid_value")
    return 1 if request.max_tokens == 0 else request.max_tokens


def _chat_max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = "max_tokens: is the earlier name of max_completion_tokens, and differs from it"
        raise FieldError("max_tokens", message, "invalid_value")
    return old if new is None else new


def _stops(request: GenerationRequest, config: GatewayConfig) -> tuple[str, ...]:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    at_most("stop", len(stops), config.max_stop_strings, "stop strings")
    for index, stop in enumerate(stops):
        param = "stop" if isinstance(request.stop, str) else f"stop[{index}]"
        if not stop:
            raise FieldError(param, f"{param}: must not be empty", "invalid_value")
        at_most(param, len(stop), config.max_stop_chars, "characters")
    return tuple(stops)


def _stop_token_ids(request: GenerationRequest, config: GatewayConfig, model: ModelInfo) -> tuple[int, ...]:
    ids = request.stop_token_ids or []
    at_most("stop_token_ids", len(ids), config.max_stop_token_ids, "ids")
    check_token_ids(ids, "stop_token_ids", model.vocab_size)
    return tuple(ids)


def complete_prompt(token_ids: list[int], param: str, options: CheckedOptions, model: ModelInfo) -> Prompt:
    """A prompt with its defaults filled in.

    Raises FieldError for no tokens or ids that the model does not have, PromptTooLongError if it does not fit.
    """
    if not token_ids and options.branch is None:
        raise FieldError(param, f"{param}: gives no tokens", "invalid_value")
    if token_ids and max(token_ids) >= model.vocab_size:
        check_token_ids(token_ids, param, model.vocab_size)
    num_given = len(token_ids)
    token_ids = _truncated(token_ids, options, model)
    params, num_free = options.params, model.max_model_len - len(token_ids)
    requested = params.max_tokens or 1
    if requested > num_free:
        raise PromptTooLongError(
            f"this model's maximum context length is {model.max_model_len} tokens, but {len(token_ids) + requested} "
            f"are requested: {len(token_ids)} in the prompt and {requested} to generate"
        )
    max_tokens = params.max_tokens or min(options.default_max_tokens or num_free, num_free)
    seed = params.seed if options.has_seed else secrets.randbits(64)
    if params.rules is not None and params.rules.min_tokens > max_tokens:
        message = f"min_tokens: {params.rules.min_tokens} is above max_tokens, which is {max_tokens}"
        raise FieldError("min_tokens", message, "invalid_value")
    params = replace(params, max_tokens=max_tokens, seed=seed)
    num_cut = num_given - len(token_ids)
    return Prompt(
        tuple(token_ids),
        params,
        options.branch,
        keep_s=options.keep_s,
        priority=options.priority,
        num_cut_tokens=num_cut,
    )


def _truncated(token_ids: list[int], options: CheckedOptions, model: ModelInfo) -> list[int]:
    """The end of the prompt that the request wants; with -1, what leaves room for its tokens."""
    limit = options.truncate_prompt_tokens
    if limit == -1:
        limit = max(1, model.max_model_len - (options.params.max_tokens or options.default_max_tokens or 1))
    return token_ids if limit is None else token_ids[-limit:]
