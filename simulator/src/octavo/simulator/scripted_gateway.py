"""A gateway without clients: it submits and aborts, and compares every token with the one that must come."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.common.messages.generation import (
    Abort,
    ChoiceFinished,
    FinishReason,
    Forget,
    ResumedChoice,
    SamplingParams,
    SchedulerMessage,
    Submit,
    TokenBatch,
)
from octavo.scheduler.sequence import choice_seed
from octavo.simulator.beam_reference import beam_answers
from octavo.simulator.scripted_worker import expected_output, likeliest_tokens


class ClientState(enum.Enum):
    """How a request stands with its client."""

    OPEN = enum.auto()
    ENDED = enum.auto()
    FAILED = enum.auto()
    LOST = enum.auto()  # gateway, scheduler or the link between them is gone; its client has got an error


@dataclass(slots=True)
class ClientChoice:
    """What a client gets of one choice."""

    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    end: ChoiceFinished | None = None
    is_aborted: bool = False


@dataclass(slots=True)
class ClientRequest:
    """One request and what came of it."""

    submit: Submit
    start: tuple[int, ...]
    """Prompt with the tokens shared with a branch point."""
    choices: list[ClientChoice]
    state: ClientState = ClientState.OPEN
    has_started: bool = False

    @property
    def can_resume(self) -> bool:
        """What is open of it has tokens, and is no search."""
        live = [choice for choice in self.choices if choice.end is None]
        return bool(live) and not self.submit.params.beam_width and all(choice.tokens for choice in live)


class ScriptedGateway:
    """Both directions of the link to the scheduler, and the requests that went over it.

    A link that ends takes its requests with it: their clients get an error, the scheduler forgets them.
    """

    def __init__(self, gateway_id: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.gateway_id = gateway_id
        self.requests: dict[int, ClientRequest] = {}
        self.to_scheduler: deque[Submit | Abort | Forget] = deque()
        self.from_scheduler: deque[SchedulerMessage] = deque()
        self.allowed_failures: set[tuple[int, str]] = set()
        """(request, reason) of refusals that are right."""
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def submit(self, submit: Submit, shared: tuple[int, ...]) -> None:
        """`shared` are the tokens before the branch point, if it has one."""
        start = shared + submit.prompt_token_ids
        choices = [ClientChoice(answer) for answer in self._answers(submit.params, start)]
        self.requests[submit.request_no] = ClientRequest(submit, start, choices)
        self.to_scheduler.append(submit)

    def resume(self, request_no: int, lost: ClientRequest) -> None:
        """Submit a lost request again, to go on with the tokens that came. Choices that were given up have ended."""
        for choice in lost.choices:
            if choice.is_aborted and choice.end is None:
                choice.end = ChoiceFinished(request_no, 0, FinishReason.ABORT)
        submit = replace(lost.submit, request_no=request_no, request_id=f"request-{request_no}", resumed=())
        if lost.has_started:
            submit = replace(submit, prompt_token_ids=lost.start, branch=None)
        if lost.can_resume:
            live = [(index, choice) for index, choice in enumerate(lost.choices) if choice.end is None]
            resumed = tuple(ResumedChoice(index, tuple(choice.tokens)) for index, choice in live)
            self.requests[request_no] = ClientRequest(replace(submit, resumed=resumed), lost.start, lost.choices)
        else:
            choices = [ClientChoice(choice.expected) for choice in lost.choices]
            self.requests[request_no] = ClientRequest(submit, lost.start, choices)
        self.to_scheduler.append(self.requests[request_no].submit)

    def forget(self, request: ClientRequest) -> None:
        self.to_scheduler.append(Forget(request.submit.request_id, request.submit.cache_salt))

    def abort(self, request: ClientRequest, choice_index: int | None) -> None:
        for index, choice in enumerate(request.choices):
            if choice_index in (None, index):
                choice.is_aborted = True
        self.to_scheduler.append(Abort(request.submit.request_no, choice_index))

    def lose_link(self) -> list[ClientRequest]:
        """Nothing comes any more. The requests that their clients had not got whole."""
        self.to_scheduler.clear()
        self.from_scheduler.clear()
        lost = [request for request in self.requests.values() if request.state is ClientState.OPEN]
        for request in lost:
            request.state = ClientState.LOST
        return lost

    def receive(self, batch: TokenBatch) -> None:
        """Check what a step brought. Raises AssertionError for what must not be."""
        for started in batch.started:
            request = self._open(started.request_no)
            assert not request.has_started, f"request {started.request_no} started twice"
            assert started.num_prompt_tokens == len(request.start), started
            assert started.num_cached_tokens <= len(request.start), started
            request.has_started = True
        for token in batch.tokens:
            self._take_token(token.request_no, token.choice_index, token.token_id)
        for end in batch.finished:
            self._take_end(end)
        for failure in batch.failed:
            request = self._open(failure.request_no)
            assert (failure.request_no, failure.reason) in self.allowed_failures, failure
            request.state = ClientState.FAILED

    def forget_ended_requests(self) -> None:
        self.requests = {no: request for no, request in self.requests.items() if request.state is ClientState.OPEN}
        self.allowed_failures.clear()

    def assert_ended(self) -> None:
        """Every request has come to its end."""
        for request_no, request in self.requests.items():
            assert request.state is not ClientState.OPEN, f"request {request_no} has no end"

    def _open(self, request_no: int) -> ClientRequest:
        request = self.requests[request_no]
        assert request.state is ClientState.OPEN, f"request {request_no} goes on after its end"
        return request

    def _take_token(self, request_no: int, choice_index: int, token_id: int) -> None:
        choice = self._open(request_no).choices[choice_index]
        place = len(choice.tokens)
        assert choice.end is None, f"request {request_no}, choice {choice_index}: a token after the end"
        assert place < len(choice.expected), f"request {request_no}, choice {choice_index}: too many tokens"
        assert token_id == choice.expected[place], (
            f"request {request_no}, choice {choice_index}: token {place} is {token_id}, not {choice.expected[place]}"
        )
        choice.tokens.append(token_id)

    def _take_end(self, end: ChoiceFinished) -> None:
        request = self._open(end.request_no)
        choice = request.choices[end.choice_index]
        name = f"request {end.request_no}, choice {end.choice_index}"
        assert choice.end is None, f"{name}: two ends"
        choice.end = end
        if end.reason is FinishReason.ABORT:
            assert choice.is_aborted, f"{name}: nobody asked for its end"
        else:
            assert choice.tokens == choice.expected, f"{name}: {len(choice.tokens)} of {len(choice.expected)} tokens"
            assert end.reason is self._reason(request.submit.params, choice.tokens), f"{name}: {end}"
        if all(choice.end is not None for choice in request.choices):
            request.state = ClientState.ENDED

    def _ending_ids(self, params: SamplingParams) -> set[int]:
        return {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}

    def _reason(self, params: SamplingParams, tokens: list[int]) -> FinishReason:
        return FinishReason.STOP if tokens[-1] in self._ending_ids(params) else FinishReason.LENGTH

    def _answers(self, params: SamplingParams, start: tuple[int, ...]) -> list[list[int]]:
        """What each choice must bring."""
        ending_ids = self._ending_ids(params)
        if params.beam_width:
            found = beam_answers(
                self._logprobs_after,
                start,
                params.max_tokens,
                width=params.beam_width,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                ending_ids=frozenset(ending_ids),
            )
            return found[: params.n]
        return [self._sampled(params, start, index, ending_ids) for index in range(params.n)]

    def _logprobs_after(self, token_ids: Sequence[int]) -> dict[int, float]:
        row = likeliest_tokens(token_ids, self._vocab_size, self._vocab_size)
        return dict(zip(row.top_token_ids, row.top_logprobs, strict=True))

    def _sampled(self, params: SamplingParams, start: tuple[int, ...], index: int, ending_ids: set[int]) -> list[int]:
        seed = choice_seed(params.seed, index)
        answer = expected_output(start, params.max_tokens, self._vocab_size, seed, params.temperature)
        first = next((place for place, token_id in enumerate(answer) if token_id in ending_ids), len(answer) - 1)
        return answer[: first + 1]
