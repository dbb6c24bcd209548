"""The requests that are alive, what ends them, and what their gateways are to be told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from octavo.common.errors import NotReadyError, OctavoError, QueueFullError
from octavo.common.messages.generation import (
    Abort,
    ChoiceFinished,
    FinishReason,
    Forget,
    ModelInfo,
    PromptLogprobs,
    RequestFailed,
    RequestStarted,
    SampledToken,
    Submit,
    TokenBatch,
    TokenLogprobs,
)
from octavo.scheduler.beams import Beams
from octavo.scheduler.branches import SharedTokens, find_shared_tokens
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.decode_rows import CHOICE, GATEWAY, REQUEST, Columns
from octavo.scheduler.places import Places
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.sequence import Request, Sequence, SequenceState
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.stopping import Ending, StopRules
from octavo.scheduler.submit_check import check_submit


class Requests:
    """Owns the live requests and the batches for gateways. Outlives a pool."""

    def __init__(self, settings: CoreSettings, places: Places, log: RequestLog, stats: SchedulerStats) -> None:
        self.model: ModelInfo | None = None
        self._settings = settings
        self._places = places
        self._log = log
        self._stats = stats
        self._live: dict[tuple[int, int], Request] = {}
        """By gateway and number."""
        self._batches: dict[int, TokenBatch] = {}
        self._sequence_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def serve(self, model: ModelInfo) -> None:
        """From now on with this model; its limits hold for requests that are alive, too."""
        self.model = model
        self._rules = StopRules(frozenset(model.eos_token_ids), model.max_model_len)
        for request in self:
            self._rules.apply_to(request)

    # Beginnings.

    def check(self, submit: Submit) -> SharedTokens | None:
        """What the request shares with the choice that it branches from.

        Raises an OctavoError if it cannot be served: nothing that could break a step gets in.
        """
        if self.model is None:
            raise NotReadyError("no worker has loaded a model yet")
        waiting = self._places.waiting
        if len(waiting) >= self._settings.max_num_waiting and waiting.has_any_of(submit.tenant):
            raise QueueFullError(f"{len(waiting)} sequences wait; try again later")
        shared = None
        if submit.branch is not None:
            shared = find_shared_tokens(submit.cache_salt, submit.branch, self, self._places.kept)
        num_shared_tokens = len(shared.token_ids) if shared else 0
        check_submit(submit, num_shared_tokens, self.model, self._settings.max_num_choices)
        return shared

    def refuse(self, gateway_id: int, submit: Submit, error: OctavoError) -> None:
        self._stats.num_failed_requests += 1
        self._log.refused(submit, error)
        self._tell_failure(gateway_id, submit.request_no, error)

    def add(self, gateway_id: int, submit: Submit, prompt: list[int]) -> Request:
        """A request that was checked, and begins. Its leader is in no place yet."""
        assert self.model is not None
        request = self._new_request(gateway_id, submit, len(prompt))
        request.num_shared_tokens = len(prompt) - len(submit.prompt_token_ids)
        leader = self.new_sequence(request, 0, prompt)
        request.live = dict.fromkeys(range(submit.params.n))
        request.leader = leader
        if submit.params.beam_width:
            request.has_fanned_out = leader.is_host_fed = True
            request.beams = Beams(self._rules.beam_group(request), leader, self.model.vocab_size)
        else:
            request.live[0] = leader
        return request

    def resume(self, gateway_id: int, submit: Submit) -> list[Sequence]:
        """A request that was checked, as it was when another scheduler lost it. Its sequences are in no place yet."""
        request = self._new_request(gateway_id, submit, len(submit.prompt_token_ids))
        request.has_fanned_out = True
        request.num_told_prompt_tokens = request.num_prompt_tokens
        sequences = [
            self.new_sequence(request, choice.choice_index, [*submit.prompt_token_ids, *choice.output_token_ids])
            for choice in submit.resumed
        ]
        request.live = {sequence.choice_index: sequence for sequence in sequences}
        request.leader = sequences[0]
        self._stats.num_resumed_requests += 1
        return sequences

    def _new_request(self, gateway_id: int, submit: Submit, num_prompt_tokens: int) -> Request:
        num_choices = max(submit.params.n, submit.params.beam_width)
        request = Request(
            gateway_id=gateway_id,
            request_no=submit.request_no,
            request_id=submit.request_id,
            params=submit.params,
            num_prompt_tokens=num_prompt_tokens,
            salt=submit.cache_salt,
            priority=submit.priority,
            tenant=submit.tenant,
            weight=submit.weight,
            turn=self._places.waiting.take_turns(submit.tenant, submit.weight, submit.priority, num_choices),
            keep_s=submit.keep_s,
            traceparent=submit.traceparent,
            has_fanned_out=submit.params.n == 1,
        )
        self._rules.apply_to(request)
        self._live[gateway_id, submit.request_no] = request
        self._stats.num_prompt_tokens += num_prompt_tokens
        return request

    def new_sequence(self, request: Request, choice_index: int, token_ids: list[int]) -> Sequence:
        sequence = Sequence(next(self._sequence_ids), request, choice_index, token_ids)
        rules = request.params.rules
        sequence.is_host_fed = rules is not None and bool(rules.grammar)
        self._log.arrived(sequence)
        return sequence

    def note_start(self, request: Request, num_cached_tokens: int) -> None:
        """Tell the gateway, the first time that a sequence of the request gets its blocks."""
        if request.has_started:
            return
        request.has_started = True
        num_cached = min(num_cached_tokens, request.num_prompt_tokens)
        self._stats.num_cached_prompt_tokens += num_cached
        shared = tuple(request.leader.token_ids[: request.num_shared_tokens])
        started = RequestStarted(request.request_no, num_cached, request.num_prompt_tokens, shared)
        self.batch(request.gateway_id).started.append(started)

    def tell_prompt_logprobs(self, request: Request, told: PromptLogprobs) -> None:
        """What of it is new: after a preemption a prompt is computed again."""
        new = told.after(max(0, request.num_told_prompt_tokens - told.start))
        if new.logprobs and (request.gateway_id, request.request_no) in self._live:
            request.num_told_prompt_tokens = new.start + len(new.logprobs)
            self.batch(request.gateway_id).prompt_logprobs.append((request.request_no, new))

    # Tokens.

    def accept_token(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Append and send on a sampled token. False if the sequence ends with it."""
        sequence.token_ids.append(token_id)
        if sequence.awaits_token:
            sequence.awaits_token = False
            self._log.token_came(sequence)
        request = sequence.request
        self._stats.num_output_tokens += 1
        batch = self._batches.get(request.gateway_id) or self.batch(request.gateway_id)
        batch.add(request.request_no, sequence.choice_index, token_id, logprobs)
        if token_id not in request.ending_ids and len(sequence.token_ids) < request.max_len:
            return True
        self.end_by_last_token(sequence)
        return False

    def send_tokens(self, columns: Columns, token_ids: list[int]) -> None:
        """Send on one sampled token for each of these rows."""
        self._stats.num_output_tokens += len(token_ids)
        gateways = columns[GATEWAY]
        for gateway_id in set(gateways.tolist()):
            batch = self.batch(gateway_id)
            is_its = gateways == gateway_id
            own = columns[:, is_its]
            batch.request_nos.extend(own[REQUEST].tolist())
            batch.choice_indexes.extend(own[CHOICE].tolist())
            batch.token_ids.extend(itertools.compress(token_ids, is_its.tolist()))

    def end_by_last_token(self, sequence: Sequence) -> None:
        """Its last token ends it."""
        ending = self._rules.ending(sequence)
        assert ending is not None
        self.end_choice(sequence.request, sequence.choice_index, ending, is_kept=True)

    def accept_answer(self, request: Request, choice_index: int, tokens: list[SampledToken]) -> None:
        """A choice is there as a whole, and ends with it."""
        self._stats.num_output_tokens += len(tokens)
        batch = self.batch(request.gateway_id)
        for token in tokens:
            batch.add(token.request_no, token.choice_index, token.token_id, token.logprobs)
        token_ids = request.leader.token_ids[: request.num_prompt_tokens]
        sequence = self.new_sequence(request, choice_index, token_ids)
        sequence.token_ids.extend([token.token_id for token in tokens])
        sequence.state = SequenceState.FINISHED
        self._log.token_came(sequence)
        request.live[choice_index] = sequence
        ending = self._rules.ending(sequence)
        self.end_choice(request, choice_index, ending or Ending(FinishReason.LENGTH), is_kept=True)

    # Endings.

    def end_choice(self, request: Request, choice_index: int, ending: Ending, *, is_kept: bool = False) -> None:
        """`is_kept`: it can be branched from afterwards, if the request asks for that."""
        sequence = request.live.pop(choice_index)
        if sequence is not None:
            goes_on = bool(request.live) and not request.has_fanned_out
            self._log.choice_ended(sequence, ending.reason, goes_on=goes_on)
        self.batch(request.gateway_id).finished.append(
            ChoiceFinished(request.request_no, choice_index, ending.reason, ending.stop_token_id)
        )
        if not request.live:
            del self._live[request.gateway_id, request.request_no]
            self._log.ended(request)
            if not request.has_fanned_out:
                sequence = request.leader
            for beam in request.beams.sequences if request.beams is not None else ():
                self._places.drop(beam)
            del request.leader
        elif not request.has_fanned_out:
            return
        if sequence is None:
            return
        if is_kept and request.keep_s > 0:
            self._places.keep(sequence)
        else:
            self._places.drop(sequence)

    def abort(self, gateway_id: int, abort: Abort) -> None:
        """End choices that the gateway wants no more. They can be kept if it tells where they end."""
        request = self._live.get((gateway_id, abort.request_no))
        if request is None:
            return
        for choice_index in list(request.live) if abort.choice_index is None else [abort.choice_index]:
            if choice_index in request.live:
                self._stats.num_aborted_choices += 1
                sequence, num_output_tokens = request.live[choice_index], abort.num_output_tokens
                if sequence is not None and num_output_tokens is not None:
                    sequence.cut_output(num_output_tokens)
                is_kept = num_output_tokens is not None
                self.end_choice(request, choice_index, Ending(FinishReason.ABORT), is_kept=is_kept)

    def abort_all_of(self, gateway_id: int) -> None:
        """The gateway is gone: its requests end, and nobody is told."""
        for request in [request for request in self if request.gateway_id == gateway_id]:
            self.abort(gateway_id, Abort(request.request_no))
        self._batches.pop(gateway_id, None)

    def fail(self, request: Request, error: OctavoError) -> None:
        self._stats.num_failed_requests += 1
        self._log.ended(request, error)
        del self._live[request.gateway_id, request.request_no]
        for sequence in request.sequences:
            self._places.drop(sequence)
        del request.leader
        self._tell_failure(request.gateway_id, request.request_no, error)

    def forget(self, forget: Forget) -> None:
        """Let go of what the request keeps, and keep nothing of it if it is alive."""
        for request in self:
            if request.request_id == forget.request_id and request.salt == forget.cache_salt:
                request.keep_s = 0.0
        for sequence in self._places.kept.forget(forget.cache_salt, forget.request_id):
            self._places.let_go(sequence)

    # Batches.

    def batch(self, gateway_id: int) -> TokenBatch:
        return self._batches.setdefault(gateway_id, TokenBatch())

    def take_batches(self, *, are_tokens_due: bool) -> dict[int, TokenBatch]:
        """By gateway. If tokens are due with the next result, those that only tell of beginnings wait for them."""
        batches = self._batches
        self._batches = {}
        if are_tokens_due:
            for gateway_id, batch in list(batches.items()):
                if not (batch.token_ids or batch.finished or batch.failed):
                    self._batches[gateway_id] = batches.pop(gateway_id)
        return batches

    def _tell_failure(self, gateway_id: int, request_no: int, error: OctavoError) -> None:
        self.batch(gateway_id).failed.append(RequestFailed(request_no, error.reason, error.message))
