"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.common.messages.generation import ModelInfo
from octavo.gateway import sse
from octavo.gateway.answer_schema import Completion
from octavo.gateway.body_reading import read_body
from octavo.gateway.cache_salt import salt_of
from octavo.gateway.choice_output import Delta, OutputRules, OutputToken
from octavo.gateway.config import GatewayConfig
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.generation_job import GenerationJob
from octavo.gateway.generation_response import GenerationResponse
from octavo.gateway.grammars import GrammarChecker
from octavo.gateway.http_errors import ErrorReport
from octavo.gateway.logprobs import finite, token_namer
from octavo.gateway.openai_schema import CompletionRequest, GenerationRequest, parse_completion
from octavo.gateway.openapi import answers, body_of
from octavo.gateway.prompt_record import PromptRecord
from octavo.gateway.request_account import account_of
from octavo.gateway.request_checks import (
    CheckedOptions,
    PromptInput,
    check_options,
    complete_prompt,
    parse_prompts,
    served_model,
)
from octavo.gateway.request_part import Prompt
from octavo.gateway.response_ids import COMPLETION_PREFIX
from octavo.gateway.stop_strings import stop_strings
from octavo.gateway.structured_output import with_grammar
from octavo.gateway.tokenization import ModelTokenizer
from octavo.gateway.worker_groups import WorkerGroups


class CompletionFormat:
    """The bodies of completions. Choice `i * n + j` is the j-th of prompt i, or its j-th best."""

    def __init__(
        self,
        request_id: str,
        model_name: str,
        prompts: Sequence[Prompt],
        records: Sequence[PromptRecord],
        request: CompletionRequest,
        pieces: TokenPieces,
    ) -> None:
        options = request.stream_options
        self._envelope = {
            "id": COMPLETION_PREFIX + request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._frame = sse.ChunkFrame(self._envelope, has_usage=bool(options and options.include_usage))
        self._prompts = prompts
        self._n = request.n or 1
        self._has_logprobs, self._num_logprobs = request.logprobs is not None, request.logprobs
        self._has_token_ids = bool(request.return_token_ids)
        self._num_prompt_logprobs = request.prompt_logprobs
        self._records, self._pieces = records, pieces
        self._name = token_namer(pieces, as_ids=bool(request.return_tokens_as_token_ids))
        self._begun: set[int] = set()
        self._tells_usage = bool(options and options.continuous_usage_stats)
        self._is_bare = not (self._has_logprobs or self._has_token_ids or self._tells_usage)
        """Nothing stands beside the text of a choice."""
        self._texts: dict[int, sse.TextEvents] = {}
        """By choice, what is written around a text and nothing else."""

    def start(self, usage: dict[str, Any]) -> bytes:
        return b""

    def chunk(self, choice: int, delta: Delta, usage: Callable[[], dict[str, Any]]) -> bytes:
        if not self._is_bare or delta.finish_reason is not None:
            return self._frame.chunk(self._choice(choice, delta), usage() if self._tells_usage else None)
        texts = self._texts.get(choice)
        if texts is None:
            texts = self._texts[choice] = self._frame.texts(self._choice(choice, Delta(sse.TEXT, (), None, None)))
        return texts.event(delta.text)

    async def end(self, usage: dict[str, Any]) -> bytes:
        return self._frame.end(usage)

    def texts(self, choice: int) -> sse.TextEvents | None:
        return self._texts.get(choice)

    def failure(self, report: ErrorReport) -> bytes:
        return sse.event(report.body)

    async def body(self, choices: Sequence[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        entries = [self._choice(index, choice) for index, choice in enumerate(choices)]
        if self._num_prompt_logprobs is not None:
            for entry in entries:
                entry["prompt_logprobs"] = self._records[entry["index"] // self._n].shown(
                    self._pieces, self._num_prompt_logprobs
                )
        return {**self._envelope, "choices": entries, "usage": usage}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens) if self._has_logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._has_token_ids:
            entry["token_ids"] = [token.token_id for token in delta.tokens if not token.is_prompt]
            if index not in self._begun:
                self._begun.add(index)
                entry["prompt_token_ids"] = list(self._prompts[index // self._n].token_ids)
        return entry

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
        names = [self._name(token.token_id) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [finite(token.logprobs.sampled) if token.logprobs else None for token in tokens],
            "top_logprobs": [self._top(name, token) for name, token in zip(names, tokens, strict=True)],
            "text_offset": [token.text_offset for token in tokens],
        }

    def _top(self, name: str, token: OutputToken) -> dict[str, float] | None:
        """The most likely tokens, and the token itself if it is not among them. None for the first of a prompt."""
        logprobs = token.logprobs
        if logprobs is None:
            return None
        pairs = list(zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True))[: self._num_logprobs]
        top = {self._name(token_id): finite(value) for token_id, value in pairs}
        top.setdefault(name, finite(logprobs.sampled))
        return top


def router(
    config: GatewayConfig, client: WorkerGroups, tokenizer: ModelTokenizer, checker: GrammarChecker
) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(
        "/v1/completions", openapi_extra=body_of(CompletionRequest), responses=answers(Completion, streams=True)
    )
    async def create_completion(request: Request) -> Response:
        body = parse_completion(await read_body(request, config.max_body_bytes))
        model = served_model(client, body.model)
        inputs = parse_prompts(
            body.prompt,
            config,
            model,
            may_be_empty=body.branch is not None,
            may_be_long=body.truncate_prompt_tokens is not None,
        )
        options = check_options(body, len(inputs), config, model, tokenizer)
        options = await with_grammar(options, body, model, config, checker)
        prompts = await _encode(inputs, body, options, model, tokenizer)
        request_id, account = request.state.request_id, account_of(request.scope)
        records = [PromptRecord(prompt.token_ids) for prompt in prompts]
        answer_format = CompletionFormat(request_id, model.model_name, prompts, records, body, tokenizer.pieces)
        return GenerationResponse(
            client,
            GenerationJob(
                request_id=request_id,
                prompts=prompts,
                records=records,
                num_returned=options.num_returned,
                cache_salt=salt_of(config, account.tenant_name, body.cache_salt),
                rules=output_rules(body, options, model, tokenizer.pieces),
                answer_format=answer_format,
                is_stream=bool(body.stream),
                received_s=request.state.received_s,
                account=account,
                timeout_s=body.timeout or config.default_timeout_s,
            ),
        )

    return routes


async def _encode(
    inputs: Sequence[PromptInput],
    body: CompletionRequest,
    options: CheckedOptions,
    model: ModelInfo,
    tokenizer: ModelTokenizer,
) -> list[Prompt]:
    texts = [prompt for prompt in inputs if isinstance(prompt, str)]
    default = body.branch is None
    adds_special_tokens = default if body.add_special_tokens is None else body.add_special_tokens
    encoded = iter(await tokenizer.encode(texts, adds_special_tokens))
    is_list = isinstance(body.prompt, list) and bool(body.prompt) and isinstance(body.prompt[0], str | list)
    return [
        complete_prompt(
            next(encoded) if isinstance(prompt, str) else prompt,
            f"prompt[{index}]" if is_list else "prompt",
            options,
            model,
        )
        for index, prompt in enumerate(inputs)
    ]


def output_rules(
    body: GenerationRequest, options: CheckedOptions, model: ModelInfo, pieces: TokenPieces
) -> OutputRules:
    """How the text of a request's choices is made, the same on both routes."""
    eos_token_ids = () if options.params.ignore_eos else model.eos_token_ids
    return OutputRules(
        pieces=pieces,
        skip_special_tokens=body.skip_special_tokens is not False,
        stops=stop_strings(options.stops) if options.stops else None,
        ending_token_ids=frozenset(options.params.stop_token_ids).union(eos_token_ids),
        lists_tokens=options.wants_logprobs or bool(body.return_token_ids),
        includes_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        echoes_prompt=isinstance(body, CompletionRequest) and bool(body.echo),
        lists_prompt=isinstance(body, CompletionRequest) and bool(body.echo) and body.logprobs is not None,
        drops_output=body.max_tokens == 0,
    )
