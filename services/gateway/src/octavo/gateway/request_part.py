"""One prompt of a generation: a request on the stream to the scheduler, and what the next one must be told of it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from octavo.common.messages.generation import (
    BranchPoint,
    PromptLogprobs,
    RequestStarted,
    ResumedChoice,
    SamplingParams,
    Submit,
)

if TYPE_CHECKING:
    from octavo.gateway.generation import Generation

MAX_LOSSES_IN_A_ROW = 5
"""Schedulers that a request may be with when they are lost, without a token in between: it may be what ends them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and how its choices are sampled."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    branch: BranchPoint | None = None
    """The tokens come after it."""
    keep_s: float = 0.0
    """Seconds for which the choices can be branched from after their end."""
    priority: int = 0
    """Lower is served first, and preempted last."""
    tenant: str = ""
    weight: int = 1
    """Of the tenant, beside others of equal priority."""
    num_cut_tokens: int = 0
    """Tokens before `token_ids` that the request let go of."""


class Part:
    """Owns the tokens that have come, so that the request outlives the scheduler that serves it."""

    __slots__ = (
        "cache_salt",
        "first_choice",
        "generation",
        "has_begun",
        "is_sent",
        "is_started",
        "num_losses",
        "num_told_prompt_tokens",
        "open_choices",
        "outputs",
        "prompt",
        "request_id",
        "request_no",
    )

    def __init__(
        self, generation: Generation, request_no: int, request_id: str, prompt_index: int, prompt: Prompt, salt: bytes
    ) -> None:
        n = prompt.params.n
        self.generation = generation
        self.request_no = request_no
        self.request_id = request_id
        self.cache_salt = salt
        self.prompt = prompt
        self.first_choice = prompt_index * n
        self.open_choices = set(range(n))
        self.outputs = [array("i") for _ in range(n)]
        """Token ids of each choice."""
        self.num_told_prompt_tokens = 0
        """Prompt tokens whose log-probabilities have come."""
        self.is_sent = False
        """The present scheduler has it."""
        self.is_started = False
        """The prompt has its blocks there."""
        self.has_begun = False
        """It has had blocks once."""
        self.num_losses = 0
        """Schedulers lost since its last token."""

    @property
    def num_prompt_tokens(self) -> int:
        """With those shared with a branch point once they are known."""
        return len(self.prompt.token_ids)

    def submit(self) -> Submit:
        """What a scheduler must be told to serve what is open of it.

        Tokens of all choices begin in the same step, so either all open choices have some or none has.
        """
        prompt = self.prompt
        resumed = tuple(ResumedChoice(choice, tuple(self.outputs[choice])) for choice in sorted(self.open_choices))
        begins = prompt.params.beam_width > 0 or not all(choice.output_token_ids for choice in resumed)
        return Submit(
            self.request_no,
            self.request_id,
            prompt.token_ids,
            prompt.params,
            self.cache_salt,
            prompt.priority,
            branch=prompt.branch,
            keep_s=prompt.keep_s,
            resumed=() if begins else resumed,
            traceparent=self.generation.traceparent,
            tenant=prompt.tenant,
            weight=prompt.weight,
        )

    def start(self, started: RequestStarted) -> bool:
        """The prompt has its blocks. False if it had some before, at another scheduler."""
        self.is_started = True
        if self.has_begun:
            return False
        self.has_begun = True
        if started.shared_token_ids:
            token_ids = started.shared_token_ids + self.prompt.token_ids
            self.prompt = replace(self.prompt, token_ids=token_ids, branch=None)
        return True

    def news_of_prompt(self, told: PromptLogprobs) -> PromptLogprobs | None:
        """What of it has not come before, from another scheduler."""
        new = told.after(max(0, self.num_told_prompt_tokens - told.start))
        self.num_told_prompt_tokens = max(self.num_told_prompt_tokens, new.start + len(new.logprobs))
        return new if new.logprobs else None

    def lose(self) -> bool:
        """The scheduler is gone. False if that has happened too often to try again."""
        self.num_losses += self.is_sent
        self.is_sent = self.is_started = False
        return self.num_losses < MAX_LOSSES_IN_A_ROW
