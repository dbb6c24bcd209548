"""A worker whose GPU is a clock: each step takes exactly as long as it is told, and gaps between steps are counted.

It samples made-up tokens; each sequence ends at a length that its scheduler does not know.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable

import uvloop

from octavo.common.codecs import WORKER_STEPS
from octavo.common.links import Address, Link, listen
from octavo.common.messages.step import (
    RowFlag,
    StepPlan,
    StepResult,
    WorkerHello,
    WorkerReady,
    WorkerReply,
    WorkerRequest,
)

EOS = 2
VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = 0o4000
_TFD_TIMER_ABSTIME = 1


class _Alarm:
    """Calls back at an instant of the monotonic clock. Event loops round their own timers to a millisecond."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK)
        self._callback = callback
        asyncio.get_running_loop().add_reader(self._fd, self._on_readable)

    def set(self, at: float) -> None:
        seconds, nanoseconds = divmod(int(at * 1e9), 1_000_000_000)
        value = (ctypes.c_long * 4)(0, 0, seconds, nanoseconds)
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(value), None)

    def _on_readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._callback()


class ClockWorker:
    """Step t starts when it has arrived and step t - 1 has ended, and ends `step_s` later."""

    def __init__(self, step_s: float, num_blocks: int, max_num_seqs: int, seed: int) -> None:
        self._step_s = step_s
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self._random = random.Random(seed)
        self._alarm = _Alarm(self._end_step)
        self._link: Link[WorkerReply, WorkerRequest] | None = None
        self._queue: deque[tuple[StepPlan, float]] = deque()
        self._end_of_last = time.monotonic()
        self._tokens_left = [0] * max_num_seqs
        self.reset_measures()

    def reset_measures(self) -> None:
        """Count from now."""
        self._began = time.monotonic()
        self.num_steps = 0
        self.num_rows = 0
        self.idle_s = 0.0
        self.slacks: list[float] = []

    def accept(self, link: Link[WorkerReply, WorkerRequest]) -> None:
        self._link = link
        self._queue.clear()
        link.bind(self._on_message, lambda error: None)

    def measures(self) -> dict[str, float]:
        """Since `reset_measures`: times in seconds, slack in milliseconds."""
        slacks = sorted(self.slacks) or [0.0]
        return {
            "elapsed_s": time.monotonic() - self._began,
            "num_steps": self.num_steps,
            "num_rows": self.num_rows,
            "idle_s": self.idle_s,
            "slack_p50_ms": 1e3 * slacks[len(slacks) // 2],
            "slack_p1_ms": 1e3 * slacks[len(slacks) // 100],
        }

    def _on_message(self, message: WorkerRequest) -> None:
        assert self._link is not None
        if isinstance(message, WorkerHello):
            self._link.send(
                WorkerReady(
                    incarnation=self._random.getrandbits(63) | 1,
                    model_name="clock",
                    num_blocks=self._num_blocks,
                    block_size=BLOCK_SIZE,
                    max_num_seqs=self._max_num_seqs,
                    max_num_batched_tokens=8192,
                    max_model_len=4096,
                    vocab_size=VOCAB_SIZE,
                    eos_token_ids=(EOS,),
                )
            )
            return
        now = time.monotonic()
        for opened in message.opened_slots:
            self._tokens_left[opened.slot] = self._random.randrange(50, 401)
        self.slacks.append(self._end_of_last - now if not self._queue else self._queue[-1][1] - now)
        start = max(now, self._queue[-1][1] if self._queue else self._end_of_last)
        self.idle_s += max(0.0, start - self._end_of_last) if not self._queue else 0.0
        self._queue.append((message, start + self._step_s))
        if len(self._queue) == 1:
            self._alarm.set(start + self._step_s)

    def _end_step(self) -> None:
        assert self._link is not None
        plan, self._end_of_last = self._queue.popleft()
        if self._queue:
            self._alarm.set(self._queue[0][1])
        self.num_steps += 1
        self.num_rows += len(plan.slots)
        tokens: list[int] = []
        for slot, flags in zip(plan.slots, plan.flags, strict=True):
            if flags & RowFlag.SAMPLE:
                self._tokens_left[slot] -= 1
                tokens.append(EOS if self._tokens_left[slot] <= 0 else 1000 + self._tokens_left[slot])
        self._link.send(StepResult(plan.step_id, tokens, [], int(self._step_s * 1e6), 0))


async def _serve(arguments: argparse.Namespace) -> None:
    worker = ClockWorker(arguments.step_ms / 1e3, arguments.num_blocks, arguments.max_num_seqs, seed=1)
    listener = await listen([Address.parse(arguments.listen)], WORKER_STEPS, worker.accept)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, worker.reset_measures)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    print(json.dumps(worker.measures()), flush=True)
    await listener.close(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--num-blocks", type=int, default=20_000)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
