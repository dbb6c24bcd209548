"""Bodies of completions and chats, as OpenAI's API has them, with the options of vLLM's server."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from octavo.common.messages.token_rules import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)
from octavo.gateway.request_body import RequestBody, json_object, validated
from octavo.gateway.unoffered_options import CHAT_OPTIONS, COMPLETION_OPTIONS, without_unoffered

_MAX_INT32 = 2**31 - 1
MAX_MESSAGES, MAX_PARTS = 4096, 1024

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
TemplateVariables = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")], str | bool | int | float | None],
    Field(max_length=32),
]
PositiveInt = Annotated[int, Field(ge=1, le=_MAX_INT32)]


class StreamOptions(RequestBody):
    """How a stream is framed."""

    include_usage: bool | None = None
    """One more chunk before the end, with no choices and the token counts."""
    include_obfuscation: bool | None = None
    """Accepted and without effect."""
    continuous_usage_stats: bool | None = None
    """The token counts so far in every chunk, of all choices together."""


class JsonSchemaFormat(RequestBody):
    """The schema that an answer follows."""

    name: str | None = None
    """Without effect."""
    description: str | None = None
    """Without effect."""
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    """Default: any object."""
    strict: bool | None = None
    """Without effect: an answer always follows the schema."""


class ResponseFormat(RequestBody):
    """`text`, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(RequestBody):
    """One of these."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    """The output is JSON of this schema."""
    json_object: bool | None = None
    """The output is any JSON object."""
    regex: Annotated[str, Field(min_length=1)] | None = None
    """The output as a whole matches this regular expression."""
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """The output is one of these."""
    grammar: Annotated[str, Field(min_length=1)] | None = None
    """The output is of this grammar, in Lark's or in GGML's BNF."""


class GenerationRequest(RequestBody):
    """What both routes share. null is the default everywhere.

    A token is chosen so: of the model's logits, those that `allowed_token_ids`, `bad_words` and `min_tokens` exclude
    are masked, each unless it would leave none; `logit_bias` is added; `repetition_penalty`, `frequency_penalty` and
    `presence_penalty` are applied; at a temperature above 0 the logits are divided by it, then `min_p`, `typical_p`,
    `top_k` and `top_p` each filter what the one before left, and one of the rest is drawn. Log-probabilities are of
    the model's logits, before all of this.
    """

    model: str | None = None
    """Name of the served model; absent means that one."""
    max_tokens: PositiveInt | None = None
    """Output tokens per choice. Default: 16 for completions, what fits the model's length for chat."""
    n: PositiveInt | None = None
    """Choices per prompt. Default 1."""
    best_of: PositiveInt | None = None
    """Generate so many choices and give the best `n`; with `use_beam_search`, the number of beams. Default: `n`."""
    use_beam_search: bool | None = None
    """Give the best `n` answers of a beam search, at temperature 0 and not as a stream. Default false."""
    length_penalty: Annotated[float, Field(ge=-16, le=16)] | None = None
    """Beam search divides an answer's log-probability by its length to this power. Default 1."""
    early_stopping: bool | None = None
    """End a beam search as soon as there are as many answers as beams. Default false: when none can become better."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Default 1. 0 is greedy, and so is anything below 0.0001."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Default 1: keep all."""
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = None
    """Default 0, which like -1 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Keep tokens with at least this share of the most likely one's probability. Default 0: keep all."""
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the tokens whose surprise is nearest to the expected one, keep the fewest whose probabilities reach this sum.
    Default 1: keep all."""
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    """Subtracted from the logit of each token that is in the output; the prompt does not count. Default 0."""
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] | None = None
    """Subtracted from a token's logit for each time that it is in the output; the prompt does not count. Default 0."""
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    """Logits of tokens that are in prompt or output are divided by it if positive, else multiplied. Default 1."""
    logit_bias: dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None = None
    """Token id, as a text, to what is added to its logit, -100 to 100."""
    allowed_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    """Only these tokens are drawn. Default: all."""
    bad_words: list[str] | None = None
    """Texts that the output does not contain as the tokens that they give, by themselves or after a space: the last
    token of each is not drawn after the others. The prompt does not count."""
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32)] | None = None
    """Output tokens before the text may end: no ending id is drawn for so many, and no stop string that one of them
    completes counts. At most `max_tokens`. Default 0."""
    response_format: ResponseFormat | None = None
    """The output as a whole is JSON, from its first token on. Unless `max_tokens` cuts it off, it ends where it is
    complete."""
    structured_outputs: StructuredOutputs | None = None
    """The same in more forms."""
    guided_json: dict[str, Any] | str | None = None
    """An earlier name of `structured_outputs.json`."""
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    """An earlier name of `structured_outputs.regex`."""
    guided_choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """An earlier name of `structured_outputs.choice`."""
    guided_grammar: Annotated[str, Field(min_length=1)] | None = None
    """An earlier name of `structured_outputs.grammar`."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Log-probabilities of the prompt tokens, and of this many most likely ones at each place; null for the first. Not
    in a stream, with beam search or with `branch`. The whole prompt is computed, whatever of it is cached."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Same seed, same tokens. Default: a random one per prompt."""
    stop: str | list[str] | None = None
    """The text ends before the first of these. None of them may be empty."""
    include_stop_str_in_output: bool | None = None
    """The text ends after the stop string, or with the text of the token that ends it. Default false."""
    stop_token_ids: list[int] | None = None
    """Ids that end the text, also with `ignore_eos`."""
    ignore_eos: bool | None = None
    """Go on after the model's own end-of-sequence ids. Default false."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default true."""
    spaces_between_special_tokens: bool | None = None
    """Where a tokenizer has no decoder, so that spaces stand between tokens: also between two special ones. Default
    true."""
    return_tokens_as_token_ids: bool | None = None
    """Name the tokens of log-probabilities `token_id:ID` instead of by their text. Default false."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = None
    """Keep this many tokens of the prompt, the last ones; -1: as many as fit. Default: refuse what does not fit."""
    priority: Annotated[int, Field(ge=-(2**31), le=_MAX_INT32)] | None = None
    """Lower is served first, and preempted last. Default 0."""
    return_token_ids: bool | None = None
    """Give the ids of the prompt and of the output beside the text. Default false."""
    stream: bool | None = None
    """Send server-sent events. Default false."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds from the request's arrival until it ends with an error, code `deadline_exceeded`, if it has not ended."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Prefix blocks are shared only between requests of equal salt."""
    keep: Annotated[float, Field(ge=0)] | None = None
    """Seconds for which the choices can be branched from after their end. Default 0."""


class BranchOptions(RequestBody):
    """Where a completion goes on from."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    """The `id` of a response that is under way, or kept by `keep`; for prompt i of several, with `-i` after it."""
    choice: Annotated[int, Field(ge=0, le=_MAX_INT32)] = 0
    """Which of its choices."""
    num_tokens: PositiveInt | None = None
    """Leading tokens of its prompt and output that are shared. Default: all that there are."""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    max_tokens: Annotated[int, Field(ge=0, le=_MAX_INT32)] | None = None
    """Output tokens per choice. Default 16. 0 only with `echo`: the answer is the prompt, and ends with `length`."""
    echo: bool | None = None
    """The text begins with the prompt, as its tokens read; with `logprobs`, their lists too. Not with `branch`.
    Default false."""
    prompt: Any = None
    """A text, token ids, or a list of either. With `branch` it comes after the shared tokens, and may be absent."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    """Log-probabilities of the tokens, and of this many most likely ones at each place."""
    add_special_tokens: bool | None = None
    """Add what the tokenizer puts around a text, such as a start token. Default true; with `branch`, false."""
    branch: BranchOptions | None = None
    """Go on from a choice of another response, sharing what was computed for it."""


class TextPart(RequestBody):
    """One piece of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(RequestBody):
    """What a call of a tool called."""

    name: ToolName
    arguments: str
    """A JSON object, as text."""


class ToolCall(RequestBody):
    """A call of a tool in an earlier answer."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: with the arguments as an object, if they are one."""
        try:
            arguments = orjson.loads(self.function.arguments)
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class ChatMessage(BaseModel):
    """One message. What only describes an earlier answer passes if it is null."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_PARTS)] | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: content is one text, its parts joined by line ends."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class Function(RequestBody):
    """What a tool is to the model."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object."""
    strict: bool | None = None
    """Passes without effect on calls that the model makes of its own accord."""

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description or "", "parameters": parameters}
        return {"type": "function", "function": function}


class Tool(RequestBody):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(RequestBody):
    """A function by its name."""

    name: ToolName


class NamedTool(RequestBody):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: PositiveInt | None = None
    """The later name of `max_tokens`."""
    logprobs: bool | None = None
    """Give log-probabilities. Default false."""
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    """Most likely tokens at each place; needs `logprobs`."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`auto`, the default with tools: the model decides. `none`: it is not shown the tools. `required`: it calls one or
    more. A tool by name: it calls that one."""
    parallel_tool_calls: bool | None = None
    """Give more than one call. Default true."""
    include_reasoning: bool | None = None
    """Give the reasoning of models that mark it, as `reasoning_content`. Default true."""
    chat_template_kwargs: TemplateVariables | None = None
    """Variables for the model's chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Write what the template begins an answer with. Default true; with `continue_final_message`, false."""
    continue_final_message: bool | None = None
    """The answer goes on inside the last message: the prompt ends in its content. Default false."""
    echo: bool | None = None
    """The content of each choice begins with that of the last message, if this is the assistant's. Default false."""
    add_special_tokens: bool | None = None
    """Add what the tokenizer puts around a text to what the template writes. Default false."""


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises FieldError."""
    return validated(CompletionRequest, without_unoffered(json_object(body), COMPLETION_OPTIONS))


def parse_chat(body: bytes) -> ChatRequest:
    """Raises FieldError."""
    return validated(ChatRequest, without_unoffered(json_object(body), CHAT_OPTIONS))
