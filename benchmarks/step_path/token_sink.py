"""A gateway without HTTP: keeps a number of requests alive and counts the tokens that come back."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys

import uvloop

from octavo.common.codecs import GENERATE
from octavo.common.links import Address, Link, connect
from octavo.common.messages.generation import (
    GatewayMessage,
    SamplingParams,
    SchedulerMessage,
    SchedulerStatus,
    Submit,
    TokenBatch,
)

PROMPT_LEN = 200
SHARED_LEN = 96
NUM_SHARED = 32
OUTPUT_LENS = (50, 401)
"""Of requests whose worker never samples an end of sequence: drawn evenly, the last one excluded."""
_NUM_DRAWN = 1_000_003


class TokenSink:
    """Replaces each finished request at once; half of the prompts begin with one of a few shared prefixes."""

    def __init__(
        self,
        link: Link[GatewayMessage, SchedulerMessage],
        num_requests: int,
        seed: int,
        asks_for_length: bool = False,
    ) -> None:
        """`asks_for_length`: `max_tokens` is what each request gets, not the worker's to end before."""
        self._asks_for_length = asks_for_length
        self._link = link
        self._num_requests = num_requests
        self._random = random.Random(seed)
        self._drawn = tuple(self._random.choices(range(10, 30_000), k=_NUM_DRAWN))
        self._shared = [self._tokens(SHARED_LEN) for _ in range(NUM_SHARED)]
        self._next_no = 1
        self._has_begun = False
        self.reset_measures()
        link.bind(self._on_message, lambda error: None)

    def reset_measures(self) -> None:
        self.num_tokens = self.num_finished = self.num_failed = 0

    def measures(self) -> dict[str, int]:
        return {"num_tokens": self.num_tokens, "num_finished": self.num_finished, "num_failed": self.num_failed}

    def _tokens(self, count: int) -> tuple[int, ...]:
        first = self._random.randrange(_NUM_DRAWN - count)
        return self._drawn[first : first + count]

    def _submit(self) -> None:
        head = self._random.choice(self._shared) if self._random.random() < 0.5 else ()
        prompt = head + self._tokens(PROMPT_LEN - len(head))
        max_tokens = self._random.randrange(*OUTPUT_LENS) if self._asks_for_length else 500
        self._link.send(Submit(self._next_no, f"r{self._next_no}", prompt, SamplingParams(max_tokens=max_tokens)))
        self._next_no += 1

    def _on_message(self, message: SchedulerMessage) -> None:
        if isinstance(message, SchedulerStatus):
            if message.ready and not self._has_begun:
                self._has_begun = True
                for _ in range(self._num_requests):
                    self._submit()
        elif isinstance(message, TokenBatch):
            self.num_tokens += len(message.tokens)
            self.num_finished += len(message.finished)
            self.num_failed += len(message.failed)
            for _ in message.finished:
                self._submit()


async def _run(arguments: argparse.Namespace) -> None:
    link = await connect(Address.parse(arguments.scheduler), GENERATE, timeout_s=10)
    sink = TokenSink(link, arguments.num_requests, seed=2, asks_for_length=arguments.asks_for_length)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, sink.reset_measures)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    print(json.dumps(sink.measures()), flush=True)
    link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheduler", required=True)
    parser.add_argument("--num-requests", type=int, required=True)
    parser.add_argument("--asks-for-length", action="store_true", help="the worker never ends a sequence by itself")
    uvloop.run(_run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
