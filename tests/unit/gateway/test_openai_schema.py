"""Bodies of requests."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from octavo.gateway.http_errors import FieldError
from octavo.gateway.openai_schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)

MESSAGES = [{"role": "user", "content": "hi"}]


OPTIONS = [
    "n",
    "best_of",
    "use_beam_search",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "seed",
    "skip_special_tokens",
    "truncate_prompt_tokens",
    "priority",
    "cache_salt",
    "stream_options",
]
"""Those of vLLM's server for text."""


def completion_error(**fields: Any) -> FieldError:
    with pytest.raises(FieldError) as caught:
        parse_completion(orjson.dumps({"prompt": "x", **fields}))
    return caught.value


def chat_error(**fields: Any) -> FieldError:
    with pytest.raises(FieldError) as caught:
        parse_chat(orjson.dumps({"messages": MESSAGES, **fields}))
    return caught.value


def test_every_option_has_one_written_definition() -> None:
    """Routes share it; only the length of an answer is another matter where an answer may be empty."""
    fields = {**ChatRequest.model_fields, **CompletionRequest.model_fields}
    assert [name for name in OPTIONS if not (fields[name].description or "").strip()] == []
    for body in (ChatRequest, CompletionRequest):
        redefined = {name for name in GenerationRequest.model_fields if name in body.__annotations__}
        assert redefined <= {"max_tokens"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", "nan"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.0),
        ("n", 0),
        ("n", True),
        ("n", 2**31),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("seed", 0.5),
        ("seed", 2**64 - 1 + 1e6),
        ("stop", 5),
        ("logprobs", True),
        ("logprobs", -1),
        ("stream", 1),
        ("ignore_eos", "true"),
        ("cache_salt", ""),
        ("stream_options", {"include_usage": 1}),
    ],
)
def test_value_outside_its_range_is_refused_by_name(name: str, value: Any) -> None:
    error = completion_error(**{name: value})
    assert error.param is not None
    assert error.param.split(".")[0] == name
    assert name in error.message


@pytest.mark.parametrize("body", [b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e309}'])
def test_numbers_that_json_does_not_have_are_refused(body: bytes) -> None:
    with pytest.raises(FieldError, match="not valid JSON"):
        parse_completion(body)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"null", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 5000])
def test_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(FieldError) as caught:
        parse_completion(body)
    assert caught.value.code == "invalid_json"


def test_unknown_field_is_refused_by_name() -> None:
    error = completion_error(temprature=0.5)
    assert (error.param, error.code) == ("temprature", "unknown_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "echo": False, "suffix": None},
        {"best_of": 3, "n": 3},
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
        {"min_p": 0, "min_tokens": 0, "repetition_penalty": 1.0, "bad_words": [], "prompt_logprobs": None},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    ],
)
def test_options_we_do_not_offer_pass_where_they_change_nothing(fields: dict[str, Any]) -> None:
    assert parse_completion(orjson.dumps({"prompt": "x", **fields})).prompt == "x"


@pytest.mark.parametrize(
    ("name", "value"), [("suffix", "after"), ("lora_request", {"lora_name": "a"}), ("logits_processors", ["x"])]
)
def test_options_we_do_not_offer_are_refused_by_name_otherwise(name: str, value: Any) -> None:
    error = completion_error(**{name: value})
    assert (error.param, error.message, error.code) == (name, f"{name} is not supported", "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template", "{% for a in range(999) %}{% endfor %}"),
        ("branch", {"id": "x"}),
    ],
)
def test_chat_options_we_do_not_offer_are_refused_by_name(name: str, value: Any) -> None:
    assert chat_error(**{name: value}).param == name


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("chat_template_kwargs", {"a b": 1}, "chat_template_kwargs.a b"),
        ("chat_template_kwargs", {"a": [1]}, "chat_template_kwargs.a"),
        ("tools", [{"type": "function"}], "tools[0].function"),
        ("tools", [{"type": "web_search"}], "tools[0].type"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ("tools", [{"type": "function", "function": {"name": "a", "parameters": []}}], "tools[0].function.parameters"),
        ("tool_choice", "any", "tool_choice"),
        ("tool_choice", {"type": "function", "function": {}}, "tool_choice.function.name"),
    ],
)
def test_bad_tools_are_refused_by_name(name: str, value: Any, param: str) -> None:
    assert (chat_error(**{name: value}).param or "").startswith(param)


def test_neutral_chat_options_pass() -> None:
    request = {
        "messages": MESSAGES,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "logit_bias": None,
    }
    assert parse_chat(orjson.dumps(request)).messages[0].content == "hi"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([MESSAGES[0], {"role": "user", "content": [{"type": "image_url"}]}], "messages[1].content[0].type"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"content": "x"}], "messages[0].role"),
        ([None], "messages[0]"),
        (MESSAGES * 5000, "messages"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}], "messages[0].content"),
    ],
)
def test_bad_message_is_named_by_its_place(messages: Any, param: str) -> None:
    assert chat_error(messages=messages).param == param


def test_missing_messages_are_named() -> None:
    with pytest.raises(FieldError) as caught:
        parse_chat(b"{}")
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


def test_parts_of_a_message_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_chat(orjson.dumps({"messages": [{"role": "user", "content": parts, "name": "eve"}]}))
    assert request.messages[0].for_template() == {"role": "user", "content": "a\nb", "name": "eve"}


def test_answer_of_the_official_client_can_be_sent_back() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert len(parse_chat(orjson.dumps({"messages": [*MESSAGES, answer, *MESSAGES]})).messages) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("typical_p", 0),
        ("presence_penalty", 2.5),
        ("presence_penalty", False),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("prompt_logprobs", -1),
        ("min_tokens", 1.0),
        ("bad_words", "word"),
        ("bad_words", [5]),
        ("allowed_token_ids", "5"),
        ("truncate_prompt_tokens", -2),
        ("priority", 0.5),
        ("include_stop_str_in_output", 1),
    ],
)
def test_value_outside_an_options_range_is_refused_by_name(name: str, value: Any) -> None:
    param = completion_error(**{name: value}).param
    assert param is not None
    assert param.startswith(name)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e309"])
@pytest.mark.parametrize("name", ["min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_no_option_takes_what_is_no_number(name: str, value: str) -> None:
    with pytest.raises(FieldError):
        parse_completion(b'{"prompt": "x", "%s": %s}' % (name.encode(), value.encode()))
    with pytest.raises(FieldError):
        parse_completion(b'{"prompt": "x", "logit_bias": {"5": %s}}' % value.encode())
