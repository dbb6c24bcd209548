"""Bodies of /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

from octavo.gateway.openai_schema import Messages, TemplateVariables, Tool
from octavo.gateway.request_body import RequestBody


class TokenizeRequest(RequestBody):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    """Name of the served model; absent means that one."""
    prompt: str | None = None
    """A text, as for a completion."""
    messages: Messages | None = None
    """A conversation, as for a chat."""
    tools: list[Tool] | None = None
    """With `messages`: functions that the model may call."""
    chat_template_kwargs: TemplateVariables | None = None
    """With `messages`: variables for the model's chat template."""
    add_special_tokens: bool | None = None
    """With `prompt`: add what the tokenizer puts around a text. Default true."""
    return_token_strs: bool | None = None
    """Give each token's text as well. Default false."""


class TokenizeAnswer(RequestBody):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    """Name of the served model; absent means that one."""
    tokens: list[Any]
    """Token ids."""


class DetokenizeAnswer(RequestBody):
    """The text of tokens, special ones too."""

    prompt: str
