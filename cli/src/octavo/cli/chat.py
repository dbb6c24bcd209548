"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
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


@dataclass
class Conversation:
    """The messages so far, and how the next answer is asked for."""

    settings: ChatSettings
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)

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
        try:
            for piece in _stream(self.settings.url, self._body()):
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
        given = {name: value for name, value in optional.items() if value is not None}
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
        print(f"octavo chat: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print()
        return EXIT_INTERRUPTED
    return EXIT_OK


def _converse(conversation: Conversation) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` line editing)
    print(f"{conversation.model} at {conversation.settings.url}. {_HELP}.")
    while (text := _read_message()) is not None:
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            print("(a new conversation)")
        elif text.startswith("/"):
            print(f"({text} is no command: {_HELP})")
        elif text:
            _answer_or_explain(conversation, text)


def _read_message() -> str | None:
    """The next line, or None at the end of the input. Ctrl-C drops what was typed."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
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
        print(f"\n({error})", file=sys.stderr)


def _print_answer(conversation: Conversation, text: str) -> None:
    with closing(conversation.ask(text)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()


def _stream(url: str, body: dict[str, Any]) -> Generator[str, None, None]:
    """The text pieces of a streamed chat completion. Closing the iterator hangs up, and the server stops."""
    timeout = httpx.Timeout(10.0, read=None)
    try:
        with (
            httpx.Client(timeout=timeout, trust_env=trusts_proxy(url), headers=key_headers()) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as response,
        ):
            if not response.is_success:
                response.read()
                raise refusal(response)
            for line in response.iter_lines():
                event = parse_event(line)
                if event is STREAM_END:
                    return
                if isinstance(event, dict):
                    for choice in event["choices"]:
                        if piece := choice["delta"].get("content"):
                            yield piece
    except httpx.TransportError as error:
        raise unreachable(url, error) from error
    raise ServerError("the server broke the answer off")
