"""The other ends of a server under test: who feeds it steps, and the clients of its streams."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson
from tokenizers import Tokenizer

from octavo.common.links import Link
from octavo.common.messages.generation import (
    Abort,
    ChoiceFinished,
    FinishReason,
    GatewayMessage,
    ModelInfo,
    RequestStarted,
    SchedulerMessage,
    SchedulerStatus,
    Submit,
    TokenBatch,
)

STOPS = ["\n\nUser:", "###", " Q:"]
"""The last one begins with every word."""
_MODEL = ModelInfo("bench", 10_000_000, 1_000_000, (0,), max_num_seqs=1024, block_size=16)
_NUM_WORDS = 4096


def words_of(tokenizer: Tokenizer) -> dict[int, str]:
    """Text of tokens that are a space and a word, by id: the spaces in a stream count them."""
    word = re.compile(r"Ġ[a-z]{2,8}")
    found = {token_id: token for token, token_id in tokenizer.get_vocab().items() if word.fullmatch(token)}
    return {token_id: " " + found[token_id][1:] for token_id in sorted(found)[:_NUM_WORDS]}


def chat(content: str, max_tokens: int) -> dict[str, Any]:
    """The body of a chat with stop strings."""
    messages = [{"role": "user", "content": content}]
    return {"model": "bench", "messages": messages, "stream": True, "max_tokens": max_tokens, "stop": STOPS}


@dataclass(slots=True)
class Counts:
    """What the clients of one measurement have received."""

    tokens: int = 0
    writes: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between two reads of a stream."""


class Feed(ABC):
    """Brings a server one token for each stream a step, as its clients receive them or when it is told to."""

    def __init__(self) -> None:
        self._received: Counts | None = None
        self._lead = self._num_sent = 0

    @property
    @abstractmethod
    def num_streams(self) -> int:
        """Streams that a step brings a token."""

    @abstractmethod
    def step(self) -> None:
        """Send one."""

    def follow(self, counts: Counts, lead: int) -> None:
        """Send steps as long as less than `lead` of them are on their way."""
        self._received, self._lead, self._num_sent = counts, lead, counts.tokens
        self.advance()

    def halt(self) -> None:
        self._received = None

    def advance(self) -> None:
        if self._received is None:
            return
        most = (self._lead - 1) * self.num_streams
        while self._num_sent - self._received.tokens <= most:
            self.step()
            self._num_sent += self.num_streams


class ScriptedScheduler(Feed):
    """The gateway's scheduler. Requests for one token get it at once, the others run until they are aborted."""

    def __init__(self, words: dict[int, str]) -> None:
        super().__init__()
        self._ids = list(words)
        self._link: Link[SchedulerMessage, GatewayMessage] | None = None
        self._running: dict[int, Iterator[int]] = {}
        self.is_connected = asyncio.Event()

    def accept(self, link: Link[SchedulerMessage, GatewayMessage]) -> None:
        self._link = link
        link.bind(self._on_message, lambda error: None)
        link.send(SchedulerStatus(True, "", _MODEL))
        self.is_connected.set()

    @property
    def num_streams(self) -> int:
        return len(self._running)

    def step(self) -> None:
        assert self._link is not None
        request_nos = list(self._running)
        token_ids = [next(tokens) for tokens in self._running.values()]
        self._link.send(TokenBatch([], request_nos, [0] * len(request_nos), token_ids))

    def _on_message(self, message: GatewayMessage) -> None:
        assert self._link is not None
        if isinstance(message, Submit):
            request_no = message.request_no
            started = RequestStarted(request_no, 0, len(message.prompt_token_ids))
            if message.params.max_tokens == 1:
                end = ChoiceFinished(request_no, 0, FinishReason.LENGTH)
                self._link.send(TokenBatch([started], [request_no], [0], [self._ids[0]], finished=[end]))
                return
            self._running[request_no] = itertools.cycle(self._ids)
            self._link.send(TokenBatch([started]))
        elif isinstance(message, Abort):
            self._running.pop(message.request_no, None)


class StepBytes(Feed, asyncio.Protocol):
    """Steps for the bare server."""

    def __init__(self) -> None:
        super().__init__()
        self.is_connected = asyncio.Event()
        self.clients = 0
        """Streams that are open."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.is_connected.set()

    @property
    def num_streams(self) -> int:
        return self.clients

    def step(self) -> None:
        self._transport.write(b".")


class StreamClient(asyncio.Protocol):
    """One client. It counts bytes: a text has one space and so has an event, a write has two carriage returns."""

    def __init__(self, path: str, body: dict[str, Any], counts: Counts, feed: Feed | None = None) -> None:
        encoded = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(encoded)}\r\n\r\n"
        self._request = head.encode() + encoded
        self._counts, self._feed = counts, feed
        self._head = b""
        self._last_s = 0.0
        self._recorded: list[bytes] = []
        self.is_recorded = False
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done when the answer has begun."""
        self.ended: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.begun.done():
            self._head += data
            if (end := self._head.find(b"\r\n\r\n")) < 0:
                return
            assert self._head.startswith(b"HTTP/1.1 200 "), self._head
            data = self._head[end + 4 :]
            self.begun.set_result(None)
        if not data:
            return
        counts = self._counts
        num_writes = data.count(b"\r") // 2
        counts.writes += num_writes
        counts.tokens += data.count(b" ") - num_writes
        if self.is_recorded:
            self._recorded.append(data)
        if self._feed is not None:
            self._feed.advance()
        now_s = time.perf_counter()
        if self._last_s:
            counts.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def connection_lost(self, exc: Exception | None) -> None:
        for state in (self.begun, self.ended):
            if not state.done():
                state.set_result(None)

    def recorded_text(self) -> str:
        """Of the events that were recorded."""
        events = re.findall(rb"data: (\{.*\})\n\n", b"".join(self._recorded))
        return "".join(orjson.loads(event)["choices"][0]["delta"].get("content", "") for event in events)
