"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from octavo.cli.api_client import (
    STREAM_END,
    ServerError,
    key_headers,
    parse_event,
    refusal,
    served_model,
    trusts_proxy,
    unreachable,
)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_HELP = "/reset starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    url: str
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    as_json: bool = False
    """One JSON object for each answer, and nothing else."""


@dataclass
class AnswerFacts:
    """What was told of an answer beside its text."""

    request_id: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


@dataclass
class Conversation:
    """The messages so far, and how the next answer is asked for."""

    settings: ChatSettings
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)
    facts: AnswerFacts = field(default_factory=AnswerFacts)
    """Of the last answer."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        system = self.settings.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Generator[str, None, None]:
        """Send a message and yield the answer piece by piece.

        Whatever part of the answer came before the end, or before the iterator was closed, becomes history; of a
        message that was not answered at all nothing does. Raises ServerError.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        self.facts = AnswerFacts()
        try:
            for piece in _stream(self.settings.url, self._body(), self.facts):
                answer += piece
                yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _body(self) -> dict[str, Any]:
        settings = self.settings
        optional = {
            "max_completion_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": settings.seed,
        }
        given: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
        if settings.as_json:
            given["stream_options"] = {"include_usage": True}
        return {"model": self.model, "messages": self.messages, "stream": True, **given}


def run_chat(settings: ChatSettings, once: str | None) -> int:
    """Chat until the user leaves, or for one message. Returns the exit status."""
    try:
        conversation = Conversation(settings, settings.model or served_model(settings.url))
        if once is not None:
            _print_answer(conversation, once)
            return EXIT_OK
        _converse(conversation)
    except ServerError as error:
        if settings.as_json:
            print(json.dumps({"error": str(error)}))
        print(f"octavo chat: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    return EXIT_OK


def _converse(conversation: Conversation) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` line editing)
    is_quiet = conversation.settings.as_json
    notices = sys.stderr if is_quiet else sys.stdout
    print(f"{conversation.model} at {conversation.settings.url}. {_HELP}.", file=notices)
    while (text := _read_message("" if is_quiet else "> ")) is not None:
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            print("(a new conversation)", file=notices)
        elif text.startswith("/"):
            print(f"({text} is no command: {_HELP})", file=notices)
        elif text:
            _answer_or_explain(conversation, text)


def _read_message(prompt: str) -> str | None:
    """The next line, or None at the end of the input. Ctrl-C drops what was typed."""
    try:
        return input(prompt).strip()
    except EOFError:
        print(end="\n" if prompt else "")
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _answer_or_explain(conversation: Conversation, text: str) -> None:
    try:
        _print_answer(conversation, text)
    except KeyboardInterrupt:
        print(" (stopped)")
    except ServerError as error:
        if conversation.settings.as_json:
            print(json.dumps({"error": str(error)}))
        print(f"\n({error})", file=sys.stderr)


def _print_answer(conversation: Conversation, text: str) -> None:
    if conversation.settings.as_json:
        print(json.dumps(_measured_answer(conversation, text), ensure_ascii=False), flush=True)
        return
    with closing(conversation.ask(text)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()


def _measured_answer(conversation: Conversation, text: str) -> dict[str, Any]:
    """The answer and what is known of it. Times are seconds since it was asked for."""
    began_s, pieces, first_s = time.perf_counter(), list[str](), None
    with closing(conversation.ask(text)) as answer:
        for piece in answer:
            first_s = first_s if first_s is not None else time.perf_counter() - began_s
            pieces.append(piece)
    return {
        "model": conversation.model,
        "content": "".join(pieces),
        **asdict(conversation.facts),
        "first_text_s": first_s,
        "duration_s": time.perf_counter() - began_s,
    }


def _stream(url: str, body: dict[str, Any], facts: AnswerFacts) -> Generator[str, None, None]:
    """The text pieces of a streamed chat completion, and `facts` about it. Closing the iterator hangs up, and the
    server stops."""
    timeout = httpx.Timeout(10.0, read=None)
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=trusts_proxy(url), headers=key_headers()) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
        ):
            if not response.is_success:
                response.read()
                raise refusal(response)
            facts.request_id = response.headers.get("x-request-id")
            for line in response.iter_lines():
                event = parse_event(line)
                if event is STREAM_END:
                    return
                if isinstance(event, dict):
                    facts.usage = event.get("usage") or facts.usage
                    for choice in event["choices"]:
                        facts.finish_reason = choice.get("finish_reason") or facts.finish_reason
                        if piece := choice["delta"].get("content"):
                            yield piece
    except httpx.TransportError as error:
        raise unreachable(url, error) from error
    raise ServerError("the server broke the answer off")
