"""A scheduler with a fixed answer for each request, for tests of the gateway."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from octavo.common.links import Link, local_pair
from octavo.common.messages.generation import (
    Abort,
    ChoiceFinished,
    Explain,
    Explained,
    FinishReason,
    Forget,
    GatewayMessage,
    ModelInfo,
    RequestFailed,
    RequestStarted,
    SchedulerMessage,
    SchedulerStatus,
    Submit,
    TokenBatch,
    TokenLogprobs,
)


@dataclass(frozen=True)
class Answer:
    """What one request gets. Each choice goes on with end-of-sequence ids when its tokens are used up."""

    choices: list[list[int]]
    """Tokens of each choice; the last entry stands for all later choices too."""
    tokens_per_step: int = 1
    num_cached_tokens: int = 0
    shared_token_ids: tuple[int, ...] = ()
    """Of a branch, in front of its prompt."""
    choice_logprobs: tuple[float, ...] = ()
    """Log-probability of every token of each choice, if they are asked for; -0.5 by default."""
    never_starts: bool = False
    """It stays in the queue."""
    pauses_after: int | None = None
    """Steps after which nothing more comes."""
    fails_after: int | None = None
    """Steps after which it fails with `failure`."""
    failure: tuple[str, str] = ("INTERNAL", "")
    """Reason and message."""


@dataclass
class _Running:
    submit: Submit
    answer: Answer
    tokens: list[Iterator[int]]
    num_tokens: list[int] = field(default_factory=list)
    open_choices: set[int] = field(default_factory=set)
    num_steps: int = 0


class ScriptedScheduler:
    """The server's end of one link at a time. Ends choices as the real one does: end ids, stop ids, max_tokens."""

    def __init__(self, model: ModelInfo, script: Callable[[Submit], Answer], step_s: float = 0.0) -> None:
        self.script = script
        self.step_s = step_s
        self.status = self.ready_status = SchedulerStatus(True, "", model)
        self.model = model
        self.submits: list[Submit] = []
        self.aborts: list[Abort] = []
        self.forgotten: list[Forget] = []
        self.explained: list[Explain] = []
        self.explanations: dict[str, bytes] = {}
        """By request id."""
        self.is_silent = False
        """Questions stay without an answer."""
        self.is_away = False
        """Connections are refused."""
        self._running: dict[int, _Running] = {}
        self._link: Link[SchedulerMessage, GatewayMessage] | None = None
        self._steps: asyncio.Task[None] | None = None

    async def connect(self) -> Link[GatewayMessage, SchedulerMessage]:
        """The gateway's end of a new link."""
        if self.is_away:
            raise OSError("nobody listens")
        client: Link[GatewayMessage, SchedulerMessage]
        server: Link[SchedulerMessage, GatewayMessage]
        client, server = local_pair()
        self.accept(server)
        return client

    def accept(self, link: Link[SchedulerMessage, GatewayMessage]) -> None:
        """The scheduler's end of a link that a gateway opened."""
        self._link = link
        link.bind(self._on_message, lambda error: self._on_closed())
        link.send(self.status)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def drop_link(self) -> None:
        """Go away, as by a crash."""
        assert self._link is not None
        self._link.close()
        self._on_closed()

    def tell_status(self, ready: bool, reason: str = "", *, is_draining: bool = False) -> None:
        self.status = replace(self.status, ready=ready, reason=reason, model=self.model, is_draining=is_draining)
        self.tell(self.status)

    def tell(self, message: SchedulerMessage) -> None:
        assert self._link is not None
        self._link.send(message)

    def _on_closed(self) -> None:
        self._running.clear()
        self._link = None

    def _on_message(self, message: GatewayMessage) -> None:
        if isinstance(message, Abort):
            self._on_abort(message)
        elif isinstance(message, Submit):
            self._on_submit(message)
        elif isinstance(message, Explain) and self._link is not None and not self.is_silent:
            self.explained.append(message)
            self._link.send(Explained(message.query_no, self.explanations.get(message.request_id, b"")))
        elif isinstance(message, Forget):
            self.forgotten.append(message)

    def _on_submit(self, message: Submit) -> None:
        self.submits.append(message)
        answer = self.script(message)
        n = message.params.n
        scripts = [answer.choices[min(index, len(answer.choices) - 1)] for index in range(n)]
        end_ids = itertools.repeat(self.model.eos_token_ids[0])
        num_before = {choice.choice_index: len(choice.output_token_ids) for choice in message.resumed}
        self._running[message.request_no] = _Running(
            message,
            answer,
            [itertools.chain(script, end_ids) for script in scripts],
            [num_before.get(choice, 0) for choice in range(n)],
            set(num_before) or set(range(n)),
        )
        if self._steps is None or self._steps.done():
            self._steps = asyncio.get_running_loop().create_task(self._run_steps())

    def _on_abort(self, abort: Abort) -> None:
        self.aborts.append(abort)
        running = self._running.get(abort.request_no)
        if running is not None:
            running.open_choices -= running.open_choices if abort.choice_index is None else {abort.choice_index}
            if not running.open_choices:
                del self._running[abort.request_no]

    async def _run_steps(self) -> None:
        while self._running and self._link is not None:
            batch = TokenBatch()
            for running in list(self._running.values()):
                self._step(running, batch)
            self._link.send(batch)
            await asyncio.sleep(self.step_s)

    def _step(self, running: _Running, batch: TokenBatch) -> None:
        answer, request_no = running.answer, running.submit.request_no
        if answer.fails_after == running.num_steps:
            batch.failed.append(RequestFailed(request_no, *answer.failure))
            del self._running[request_no]
            return
        if answer.never_starts or answer.pauses_after == running.num_steps:
            return
        if running.num_steps == 0:
            batch.started.append(
                RequestStarted(
                    request_no,
                    answer.num_cached_tokens,
                    len(answer.shared_token_ids) + len(running.submit.prompt_token_ids),
                    answer.shared_token_ids,
                )
            )
        running.num_steps += 1
        for choice in sorted(running.open_choices):
            for _ in range(answer.tokens_per_step):
                if choice in running.open_choices:
                    self._sample(running, choice, batch)
        if not running.open_choices:
            del self._running[request_no]

    def _sample(self, running: _Running, choice: int, batch: TokenBatch) -> None:
        params, request_no = running.submit.params, running.submit.request_no
        token_id = next(running.tokens[choice])
        running.num_tokens[choice] += 1
        logprobs = None
        if params.num_logprobs is not None:
            top = tuple((token_id + index) % self.model.vocab_size for index in range(params.num_logprobs))
            sampled = running.answer.choice_logprobs[choice] if running.answer.choice_logprobs else -0.5
            logprobs = TokenLogprobs(sampled, top, tuple(-0.5 - index for index in range(len(top))))
        batch.add(request_no, choice, token_id, logprobs)
        reason, stop_token_id = None, None
        if token_id in params.stop_token_ids:
            reason, stop_token_id = FinishReason.STOP, token_id
        elif token_id in self.model.eos_token_ids and not params.ignore_eos:
            reason = FinishReason.STOP
        elif running.num_tokens[choice] == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            batch.finished.append(ChoiceFinished(request_no, choice, reason, stop_token_id))
            running.open_choices.discard(choice)
