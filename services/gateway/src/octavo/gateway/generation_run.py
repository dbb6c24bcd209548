"""A generation under way: owns the outputs of all its choices, and what is measured of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from octavo.common.errors import ProtocolError
from octavo.common.messages.generation import ChoiceFinished, PromptLogprobs, RequestStarted, SampledToken
from octavo.gateway import metrics
from octavo.gateway.best_of import ChoiceRanking
from octavo.gateway.choice_output import ChoiceOutput, Delta
from octavo.gateway.generation import Events, Generation
from octavo.gateway.generation_job import GenerationJob


class GenerationRun:
    """The outputs of all choices, and what is measured of them."""

    __slots__ = ("_job", "_ranking", "_started_s", "first_token_s", "has_shown", "outputs", "submitted_s")

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self.outputs = [
            ChoiceOutput(job.rules, record) for record in job.records for _ in range(job.prompts[0].params.n)
        ]
        self.submitted_s = 0.0
        self._started_s: float | None = None
        self.first_token_s: float | None = None
        """Of any choice."""
        self.has_shown = False
        """The client has some output, or will have it with the rest."""
        n = job.prompts[0].params.n
        self._ranking = ChoiceRanking(len(job.prompts), n) if n > job.num_returned else None

    @property
    def num_output_tokens(self) -> int:
        """Of all choices, so far."""
        return sum(output.num_tokens for output in self.outputs)

    def returned_choices(self) -> Sequence[int]:
        """Those that the answer shows, in its order."""
        return range(len(self.outputs)) if self._ranking is None else self._ranking.best(self._job.num_returned)

    def take(self, events: Events, generation: Generation) -> list[tuple[int, Delta]]:
        """What the events bring for the client, one delta per choice at most."""
        outputs = self.outputs
        num_new_tokens: dict[int, int] = {}
        for choice, event in events:
            output = outputs[choice]
            if output.is_closed:
                continue
            if type(event) is int:
                output.push(event)
            elif type(event) is SampledToken:
                if self._ranking is not None and not output.is_finished:
                    self._ranking.add(choice, event.logprobs)
                output.push(event.token_id, event.logprobs)
            elif type(event) is ChoiceFinished:
                output.finish(event)
                num_new_tokens.setdefault(choice, 0)
                continue
            else:
                if type(event) is RequestStarted:
                    self._observe_start()
                elif type(event) is PromptLogprobs:
                    self._job.records[choice // self._job.prompts[0].params.n].add(event)
                continue
            num_new_tokens[choice] = num_new_tokens.get(choice, 0) + 1
            if output.is_finished:
                generation.abort_choice(choice, output.num_tokens)
        now_s = time.perf_counter()
        deltas = []
        for choice, num_tokens in num_new_tokens.items():
            output = outputs[choice]
            if num_tokens:
                self.observe_tokens(output, num_tokens, now_s)
            delta = output.take()
            if delta is not None:
                deltas.append((choice, delta))
        return deltas

    def observe_tokens(self, output: ChoiceOutput, num_tokens: int, now_s: float) -> None:
        """They have come at this time of `time.perf_counter()`."""
        last_s, output.last_token_s = output.last_token_s, now_s
        if last_s is not None:
            metrics.INTER_TOKEN_LATENCY_SECONDS.observe((now_s - last_s) / num_tokens, num_tokens)
            return
        output.first_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
            if self._started_s is not None:
                metrics.PREFILL_SECONDS.observe(now_s - self._started_s)

    def _observe_start(self) -> None:
        """Of several prompts, the first counts."""
        if self._started_s is None:
            self._started_s = time.perf_counter()
            metrics.QUEUE_SECONDS.observe(self._started_s - self.submitted_s)

    def observe_first_output(self) -> None:
        """It has been sent, or is kept for the whole answer."""
        self.has_shown = True
        if self.first_token_s is not None:
            shown_s = time.perf_counter() if self._job.is_stream else self.first_token_s
            self._job.account.ttft_s = shown_s - self._job.received_s
            metrics.TTFT_SECONDS.observe(self._job.account.ttft_s)

    def observe_choices(self, unfinished: str) -> None:
        """How each choice ended; `unfinished` is the reason of those that did not."""
        for output in self.outputs:
            metrics.FINISHED_CHOICES.labels(output.finish_reason or unfinished).inc()
            first_s, last_s = output.first_token_s, output.last_token_s
            if output.finish_reason is None or first_s is None or last_s is None:
                continue
            metrics.OUTPUT_LENGTH.observe(output.num_tokens)
            metrics.DECODE_SECONDS.observe(last_s - first_s)
            if output.num_tokens > 1:
                metrics.TPOT_SECONDS.observe((last_s - first_s) / (output.num_tokens - 1))

    def check_all_ended(self) -> None:
        if not all(output.is_closed for output in self.outputs):
            raise ProtocolError("the scheduler ended a request before all of its choices")

    def usage(self, generation: Generation) -> dict[str, Any]:
        num_prompt_tokens = generation.num_prompt_tokens
        num_output_tokens = self.num_output_tokens
        details = {"cached_tokens": generation.num_cached_tokens}
        if num_cut := sum(prompt.num_cut_tokens for prompt in self._job.prompts):
            details["truncated_tokens"] = num_cut
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "prompt_tokens_details": details,
        }

    def observe_end(self) -> None:
        for prompt in self._job.prompts:
            metrics.PROMPT_TOKENS.inc(len(prompt.token_ids))
            metrics.PROMPT_LENGTH.observe(len(prompt.token_ids))
        metrics.OUTPUT_TOKENS.inc(self.num_output_tokens)
        metrics.REQUEST_SECONDS.observe(time.perf_counter() - self._job.received_s)
