"""From a chat request to its generation, for all routes that converse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request

from octavo.common.messages.generation import ModelInfo
from octavo.gateway.answer_reading import AnswerReading, model_answers
from octavo.gateway.cache_salt import salt_of
from octavo.gateway.chat_template import RESERVED_VARIABLES, TemplateOptions
from octavo.gateway.choice_output import OutputRules
from octavo.gateway.completions import output_rules
from octavo.gateway.config import GatewayConfig
from octavo.gateway.generation_job import AnswerFormat, GenerationJob
from octavo.gateway.generation_response import GenerationResponse
from octavo.gateway.grammars import GrammarChecker
from octavo.gateway.http_errors import FieldError
from octavo.gateway.openai_schema import ChatRequest
from octavo.gateway.prompt_record import PromptRecord
from octavo.gateway.request_account import account_of
from octavo.gateway.request_checks import check_options, complete_prompt, served_model
from octavo.gateway.request_part import Prompt
from octavo.gateway.structured_output import with_grammar
from octavo.gateway.tokenization import ModelTokenizer
from octavo.gateway.tool_choice import ToolUse, tool_use
from octavo.gateway.worker_groups import WorkerGroups


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A checked request whose prompt is token ids."""

    request: ChatRequest
    model: ModelInfo
    prompt: Prompt
    record: PromptRecord
    num_returned: int
    rules: OutputRules
    reading: AnswerReading


class ChatPreparation:
    """Knows the model; one for all requests."""

    def __init__(
        self, config: GatewayConfig, client: WorkerGroups, tokenizer: ModelTokenizer, checker: GrammarChecker
    ) -> None:
        self._config, self._client, self._tokenizer, self._checker = config, client, tokenizer, checker
        self._answers = model_answers(config, tokenizer.chat_template)

    @property
    def has_reasoning(self) -> bool:
        """The model marks reasoning, and it is told from the answer."""
        return self._answers.has_reasoning

    async def prepare(self, request: ChatRequest) -> PreparedChat:
        """Raises FieldError and OctavoError for a request that cannot be served."""
        model = served_model(self._client, request.model)
        options = check_options(request, 1, self._config, model, self._tokenizer)
        tools = self._tool_use(request)
        options = await with_grammar(options, request, model, self._config, self._checker, tools.grammar)
        token_ids, reading = await self._encode(request, tools)
        if options.params.rules is not None and options.params.rules.grammar:
            reading = replace(reading, has_reasoning=False)  # the form begins with the first token
        prompt = complete_prompt(token_ids, "messages", options, model)
        return PreparedChat(
            request,
            model,
            prompt,
            PromptRecord(prompt.token_ids),
            options.num_returned,
            output_rules(request, options, model, self._tokenizer.pieces_with(reading.marks)),
            reading,
        )

    async def prompt_token_ids(self, request: ChatRequest) -> list[int]:
        """The prompt that the messages become, however long. Raises as `prepare` does."""
        served_model(self._client, request.model)
        return (await self._encode(request, self._tool_use(request), aside=True))[0]

    async def num_tokens(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len((await self._tokenizer.encode([text], False))[0])

    def _tool_use(self, request: ChatRequest) -> ToolUse:
        return tool_use(request, self._answers, self._tokenizer.chat_template, self._config)

    async def _encode(
        self, request: ChatRequest, tools: ToolUse, *, aside: bool = False
    ) -> tuple[list[int], AnswerReading]:
        messages = [message.for_template() for message in request.messages]
        encoded = await self._tokenizer.encode_chat(
            messages,
            template_options(request, tools.for_template),
            bool(request.add_special_tokens),
            aside=aside,
        )
        return encoded.token_ids, tools.reading.after_prompt(encoded.is_thinking)

    def response(self, http_request: Request, chat: PreparedChat, answer_format: AnswerFormat) -> GenerationResponse:
        """The answer."""
        request, account = chat.request, account_of(http_request.scope)
        return GenerationResponse(
            self._client,
            GenerationJob(
                request_id=http_request.state.request_id,
                prompts=[chat.prompt],
                records=[chat.record],
                num_returned=chat.num_returned,
                cache_salt=salt_of(self._config, account.tenant_name, request.cache_salt),
                rules=chat.rules,
                answer_format=answer_format,
                is_stream=bool(request.stream),
                received_s=http_request.state.received_s,
                account=account,
                timeout_s=request.timeout or self._config.default_timeout_s,
            ),
        )


def template_options(request: ChatRequest, tools: Sequence[dict[str, Any]]) -> TemplateOptions:
    """How the messages are rendered. Raises FieldError."""
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        message = "continue_final_message: is not allowed with add_generation_prompt"
        raise FieldError("continue_final_message", message, "invalid_value")
    return TemplateOptions(
        adds_generation_prompt=request.add_generation_prompt is not False and not continues,
        continues_final_message=continues,
        tools=tools,
        variables=template_variables(request),
    )


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """What the template may read. Raises FieldError for what a request cannot set."""
    variables = request.chat_template_kwargs or {}
    for name in variables:
        if name in RESERVED_VARIABLES:
            param = f"chat_template_kwargs.{name}"
            raise FieldError(param, f"{param}: must not be set by a request", "invalid_value")
    return variables
