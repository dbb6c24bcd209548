"""What form a request wants its output to have, under the names of the OpenAI API and of vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson

from octavo.common.messages.generation import ModelInfo
from octavo.common.messages.token_rules import NO_RULES
from octavo.gateway.config import GatewayConfig
from octavo.gateway.grammars import GrammarChecker, GrammarSource
from octavo.gateway.http_errors import FieldError
from octavo.gateway.limits import at_most
from octavo.gateway.openai_schema import GenerationRequest
from octavo.gateway.request_checks import CheckedOptions

_ANY_OBJECT = {"type": "object"}


async def with_grammar(
    options: CheckedOptions,
    request: GenerationRequest,
    model: ModelInfo,
    config: GatewayConfig,
    checker: GrammarChecker,
    forced: GrammarSource | None = None,
) -> CheckedOptions:
    """The options with the grammar that the request asks for, if any. Raises FieldError and QueueFullError.

    `forced` follows from another field, and stands alone.
    """
    source = grammar_source(request, config, forced)
    if source is None:
        return options
    _check_options(request, options, model)
    rules = replace(options.params.rules or NO_RULES, grammar=await checker.grammar(source))
    return replace(options, params=replace(options.params, rules=rules))


def grammar_source(
    request: GenerationRequest, config: GatewayConfig, forced: GrammarSource | None = None
) -> GrammarSource | None:
    """Raises FieldError if it asks for more than one, or for one that is too large."""
    sources = [*([forced] if forced is not None else []), *_sources(request)]
    if not sources:
        return None
    if len(sources) > 1:
        first, second = sources[0].param, sources[1].param
        raise FieldError(second, f"{second}: is not allowed with {first}", "invalid_value")
    [source] = sources
    for part in (*source.parts, source):
        at_most(part.param, len(orjson.dumps(part.value)), config.max_grammar_bytes, "bytes")
    return source


def _sources(request: GenerationRequest) -> list[GrammarSource]:
    outputs = request.structured_outputs
    json_object = outputs is not None and bool(outputs.json_object)
    given: list[tuple[str, str, Any]] = [
        ("guided_json", "json", request.guided_json),
        ("guided_regex", "regex", request.guided_regex),
        ("guided_choice", "choice", request.guided_choice),
        ("guided_grammar", "grammar", request.guided_grammar),
        ("structured_outputs.json", "json", outputs and outputs.json_schema),
        ("structured_outputs.regex", "regex", outputs and outputs.regex),
        ("structured_outputs.choice", "choice", outputs and outputs.choice),
        ("structured_outputs.grammar", "grammar", outputs and outputs.grammar),
        ("structured_outputs.json_object", "json", _ANY_OBJECT if json_object else None),
    ]
    form = request.response_format
    if form is not None and form.type == "json_object":
        given.append(("response_format", "json", _ANY_OBJECT))
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise FieldError("response_format.json_schema", "response_format.json_schema: is missing", "invalid_value")
        schema = form.json_schema.json_schema
        given.append(("response_format.json_schema", "json", _ANY_OBJECT if schema is None else schema))
    return [
        GrammarSource(param, kind, _schema(param, value) if kind == "json" else value)
        for param, kind, value in given
        if value is not None
    ]


def _schema(param: str, value: Any) -> Any:
    """A schema may be given as a text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise FieldError(param, f"{param}: is not valid JSON: {error}", "invalid_value") from None


def _check_options(request: GenerationRequest, options: CheckedOptions, model: ModelInfo) -> None:
    for name, is_at_odds in (
        ("ignore_eos", bool(request.ignore_eos)),
        ("min_tokens", bool(request.min_tokens)),
        ("allowed_token_ids", request.allowed_token_ids is not None),
        ("bad_words", bool(request.bad_words)),
        ("use_beam_search", bool(options.params.beam_width)),
    ):
        if is_at_odds:
            raise FieldError(name, f"{name}: is not allowed with structured output", "invalid_value")
    if not model.eos_token_ids:
        raise FieldError(None, "structured output needs a model that has an end-of-sequence token", "invalid_value")
