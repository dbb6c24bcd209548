"""Readers of tool calls and reasoning: what each format means, and that it does not matter where the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.gateway.answer_parts import (
    AnswerPart,
    AnswerReader,
    CallArguments,
    CallStart,
    Content,
    PlainReader,
    Reasoning,
    joined,
)
from octavo.gateway.answer_reading import TOOL_FORMATS, AnswerReading
from octavo.gateway.json_scanner import JsonScanner, Place
from octavo.gateway.reasoning import ReasoningReader
from octavo.gateway.tool_calls.base import OfferedTools
from octavo.gateway.tool_calls.forced import ForcedArgumentsReader, ForcedCallsReader

FORMATS = sorted(TOOL_FORMATS)


def tool_reader(name: str) -> AnswerReader:
    ids = itertools.count()
    tools = OfferedTools(frozenset({"add", "get_weather"}), lambda: f"id{next(ids)}")
    if name == "calls":
        return ForcedCallsReader(tools)
    return ForcedArgumentsReader(tools, "add") if name == "arguments" else TOOL_FORMATS[name].reader(tools)


def read(reader: AnswerReader, *pieces: str) -> list[AnswerPart]:
    return joined([part for piece in pieces for part in reader.feed(piece)] + reader.end())


def call(number: int, name: str, arguments: str) -> list[AnswerPart]:
    start = CallStart(f"id{number}", name)
    return [start, CallArguments(arguments)] if arguments else [start]


HERMES = [
    (
        '<tool_call>\n{"name": "add", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>',
        call(0, "add", '{"a": [1, {"b": "}"}]}'),
    ),
    (
        'Let me see.\n\n<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>\n<tool_call>'
        '{"name": "get_weather", "arguments": {}}</tool_call> done',
        [Content("Let me see."), *call(0, "add", '{"a": 1}'), *call(1, "get_weather", "{}"), Content("done")],
    ),
    ('<tool_call>{"name": "add"}', call(0, "add", "{}")),
    ('<tool_call>{"name": "add", "arguments": {"a": "x', call(0, "add", '{"a": "x')),
    ('<tool_call>{"name": "add", "id": 7, "arguments": {}}</tool_call>', call(0, "add", "{}")),
    (
        '<tool_call>{"name": "add", "arguments": {}}<tool_call>{"name": "add"}',
        call(0, "add", "{}") + call(1, "add", "{}"),
    ),
    (
        '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>',
        [*call(0, "add", '{"a": '), Content("}}</tool_call>")],
    ),
]
HERMES_TEXTS = [
    "a <tool_call>",
    " a <tool_cal b </tool_call> ",
    '<tool_call>{"name": "remove", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
    "<tool_call>add(1, 2)</tool_call>",
    '<tool_call>{"name": "add", "name": "add"}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
]
MISTRAL = [
    (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
        call(0, "add", '{"a": 1}') + call(1, "add", "{}"),
    ),
    (
        'Yes. [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"c": "x"}',
        [Content("Yes."), *call(0, "add", '{"a": 1}'), *call(1, "get_weather", '{"c": "x"}')],
    ),
    ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": {}}', call(0, "add", '{"a": {}}')),
    ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1', call(0, "add", '{"a": 1')),
]
MISTRAL_TEXTS = ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]remove{}", "[TOOL", "a [TOOL_CALLS] add\nb {}"]
LLAMA3 = [
    ('{"name": "add", "parameters": {"a": 1}}', call(0, "add", '{"a": 1}')),
    (
        '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"b": null}}',
        call(0, "add", "{}") + call(1, "add", '{"b": null}'),
    ),
    (
        '<|python_tag|>get_weather.call(city="São Paulo", days=[1, 2])',
        call(0, "get_weather", '{"city": "São Paulo", "days": [1, 2]}'),
    ),
]
LLAMA3_TEXTS = [
    '{"name": "Bob", "parameters": {}}',
    '{"a": 1}',
    '  plain {"name": "add", "parameters": {}}',
    "<|python_tag|>print(1)",
    "<|python_tag|>add.call(a=open('x'))",
    "<|python_tag|>remove.call(a=1)",
    "<|pyth",
]
CALLS = [
    (
        '[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
        call(0, "add", '{"a": 1}') + call(1, "add", "{}"),
    ),
    ('\n[ {"name": "add", "arguments": {"a": [', call(0, "add", '{"a": [')),
    ("x", [Content("x")]),
]
ARGUMENTS = [
    (' {"a": 1}\n', call(0, "add", '{"a": 1}')),
    ('{"a', call(0, "add", '{"a')),
    ("[1]", [Content("[1]")]),
]
CASES = [
    *(("calls", text, parts) for text, parts in CALLS),
    *(("arguments", text, parts) for text, parts in ARGUMENTS),
    *(("hermes", text, parts) for text, parts in HERMES),
    *(("hermes", text, [Content(text)]) for text in HERMES_TEXTS),
    *(("mistral", text, parts) for text, parts in MISTRAL),
    *(("mistral", text, [Content(text)]) for text in MISTRAL_TEXTS),
    *(("llama3_json", text, parts) for text, parts in LLAMA3),
    *(("llama3_json", text, [Content(text)]) for text in LLAMA3_TEXTS),
]


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_text_means_these_parts_wherever_it_is_cut(name: str, text: str, parts: list[AnswerPart]) -> None:
    assert read(tool_reader(name), text) == parts
    assert read(tool_reader(name), *text) == parts
    for position in range(1, len(text)):
        assert read(tool_reader(name), text[:position], text[position:]) == parts


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "add",
    "get_weather",
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "add", "parameters": {"x": "\\u00e9"}}',
    '"name"',
    ":",
    ",",
    "{",
    "}",
    "[",
    "]",
    '"',
    " ",
    "\n",
    "\\",
    "1",
    "e",
    "null",
    ";",
    ".call(",
    "a=1)",
    "é",
    "x",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def readers() -> dict[str, Callable[[], AnswerReader]]:
    names = [*FORMATS, "calls", "arguments"]
    made: dict[str, Callable[[], AnswerReader]] = {name: lambda name=name: tool_reader(name) for name in names}
    made["think"] = lambda: ReasoningReader(PlainReader(), is_begun=False)
    made["begun"] = lambda: ReasoningReader(tool_reader("hermes"), is_begun=True)
    return made


@pytest.mark.parametrize("name", sorted(readers()))
@given(text=texts, data=st.data())
def test_cuts_do_not_matter(name: str, text: str, data: st.DataObject) -> None:
    make = readers()[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
    whole = read(make(), text)
    assert read(make(), *pieces) == read(make(), *text) == whole
    starts = [part for part in whole if isinstance(part, CallStart)]
    assert all(part.name in ("add", "get_weather") for part in starts)


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(alphabet="abc {}\n", max_size=30))
def test_text_without_marks_stays_as_it_is(name: str, text: str) -> None:
    assert read(tool_reader(name), text) == ([Content(text)] if text else [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(value=json_values, indent=st.sampled_from([None, 1]))
def test_scanner_takes_what_is_json(value: object, indent: int | None) -> None:
    scanner = JsonScanner()
    assert all(scanner.feed(char) for char in json.dumps(value, indent=indent) + " ")
    assert scanner.place is Place.END


@given(text=st.text(alphabet='{}[]",: \\u0a1-.eE+truefalsn', max_size=14))
def test_scanner_refuses_what_is_not(text: str) -> None:
    scanner = JsonScanner()
    is_taken = all(scanner.feed(char) for char in text + " ") and scanner.place is Place.END
    try:
        json.loads(text)
    except ValueError:
        assert not is_taken
    else:
        assert is_taken


@given(arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_arguments_come_through_as_they_were_written(arguments: dict[str, object]) -> None:
    text = json.dumps(arguments)
    for name, written in (
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {text}}}</tool_call>'),
        ("mistral", f"[TOOL_CALLS]add{text}"),
        ("llama3_json", f'{{"name": "add", "parameters": {text}}}'),
    ):
        assert read(tool_reader(name), written) == call(0, "add", text)


@pytest.mark.parametrize(
    ("text", "is_begun", "parts"),
    [
        ("<think>\nOne.\n\nTwo.\n</think>\n\nYes. ", False, [Reasoning("One.\n\nTwo."), Content("Yes. ")]),
        ("\nOne.\n</think>Yes.", True, [Reasoning("One."), Content("Yes.")]),
        ("Yes. <think>no</think>", False, [Content("Yes. <think>no</think>")]),
        ("<think>\n\n</think>\n\nYes.", False, [Content("Yes.")]),
        ("<think>On and on ", False, [Reasoning("On and on")]),
        ("  <thin", False, [Content("  <thin")]),
        ("", True, []),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, is_begun: bool, parts: list[AnswerPart]) -> None:
    assert read(ReasoningReader(PlainReader(), is_begun=is_begun), text) == parts
    assert read(ReasoningReader(PlainReader(), is_begun=is_begun), *text) == parts


def test_calls_come_after_reasoning_and_not_in_it() -> None:
    text = '<think>I could <tool_call>{"name": "add"}</tool_call></think>\n<tool_call>{"name": "add"}</tool_call>'
    reading = AnswerReading(tools=lambda: tool_reader("hermes"), has_reasoning=True)
    thought = Reasoning('I could <tool_call>{"name": "add"}</tool_call>')
    assert read(reading.reader(), *text) == [thought, *call(0, "add", "{}")]


def test_only_the_first_call_is_given_where_one_is_wanted() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' * 3 + "x"
    reading = AnswerReading(tools=lambda: tool_reader("hermes"), is_single_call=True)
    assert read(reading.reader(), *text) == [*call(0, "add", '{"a": 1}'), Content("x")]
