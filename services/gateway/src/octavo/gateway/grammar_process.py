"""A process that turns what clients ask for into grammars, and tries each with the model's tokenizer.

Its parent ends it when a grammar takes too long; its own limit of memory ends it when one takes too much. Each line of
its input is a JSON object with `kind` and `value`; each line of its output has `grammar`, or `error` for the client.
The first line of the output, `{}`, says that it is ready.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

MAX_BYTES = 3 * 2**30
"""Of address space, most of which threads and libraries only reserve."""
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the parts of JSON. Without a limit, a model may write nothing else for ever."""


def grammar_of(kind: str, value: Any) -> str:
    """In the language that workers read. Raises what llguidance does: ValueError, for BNF anything."""
    matcher = llguidance.LLMatcher
    if kind == "json":
        return matcher.grammar_from_json_schema(json.dumps(value), defaults={"whitespace_pattern": WHITE_SPACE})
    if kind == "regex":
        return matcher.grammar_from_regex(value)
    if kind == "choice":
        return matcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
        )
    return matcher.grammar_from_lark(any_to_lark(value))


def checked(kind: str, value: Any, tokenizer: llguidance.LLTokenizer) -> dict[str, str]:
    """The answer to one line."""
    try:
        grammar = grammar_of(kind, value)
    except Exception as error:  # the reader of BNF raises Exception itself
        return {"error": _reason(error)}
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return {"error": _reason(matcher.get_error())}
    return {"grammar": grammar}


def _reason(problem: object) -> str:
    """What is wrong. Of a pattern that is a later line than the first, and the pattern stands in the second."""
    lines = str(problem).strip().split("\n")
    if lines[0].startswith("NoExtension"):
        return "no text can be of it"
    for line in lines:
        if line.startswith("error: "):
            return f"{line.removeprefix('error: ')}, in the pattern {lines[1].strip()}"[:300]
    return lines[0][:300]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    tokenizer = llguidance.LLTokenizer(sys.argv[1])
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(checked(request["kind"], request["value"], tokenizer)), flush=True)


if __name__ == "__main__":
    main()
