"""What the result of a step does: sequences move on, tokens go out, choices fan out and end."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from octavo.common.errors import InvalidGrammarError, NumericError, ProtocolError
from octavo.common.messages.generation import TokenLogprobs
from octavo.common.messages.step import GRAMMAR_FAILED, NOT_FINITE, NOT_READY, StepResult
from octavo.scheduler.beam_progress import BeamProgress
from octavo.scheduler.decode_rows import LaunchedDecodes
from octavo.scheduler.forks import Forks
from octavo.scheduler.launcher import LaunchedStep
from octavo.scheduler.places import Places
from octavo.scheduler.preemption import Preemption
from octavo.scheduler.relief import Relief
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.requests import Requests
from octavo.scheduler.sequence import Sequence, SequenceState
from octavo.scheduler.stats import SchedulerStats
from octavo.scheduler.timeline import Step
from octavo.scheduler.worker_pool import WorkerPool

_NEVER_FULL = 2**62
_NO_LOGPROBS: tuple[TokenLogprobs | None, ...] = ()


class StepResults:
    """Matches results with the rows as they were launched. Has no state of its own."""

    def __init__(
        self,
        pool: WorkerPool,
        places: Places,
        requests: Requests,
        forks: Forks,
        relief: Relief,
        preemption: Preemption,
        log: RequestLog,
        stats: SchedulerStats,
        *,
        publishes: bool,
    ) -> None:
        """`publishes`: full blocks are told to the KV manager, to be found by others."""
        self._pool = pool
        self._places = places
        self._requests = requests
        self._forks = forks
        self._relief = relief
        self._preemption = preemption
        self._log = log
        self._stats = stats
        self._beams = BeamProgress(places, requests, forks, log)
        self._publication_size = pool.account.block_size if publishes else _NEVER_FULL

    def accept(self, result: StepResult) -> None:
        """Accept what a step brought. Raises MessageGapError if it is not the oldest step on its way, and
        ProtocolError if it has another number of samples than the step."""
        step = self._pool.steps.acknowledge(result.step_id)
        self._stats.num_steps += 1
        self._stats.worker_busy_s += result.compute_us * 1e-6
        self._stats.worker_idle_s += result.idle_us * 1e-6
        self._stats.timeline.step_is_back(
            Step(
                step.step_id,
                step.launched_at,
                0.0,
                result.compute_us,
                result.idle_us,
                len(step.rows) + len(step.decodes or ()),
                step.num_tokens,
                step.num_prefill_tokens,
            )
        )
        if result.finished_transfers or step.num_prefill_tokens:
            self._take_measures(step, result)
        num_decodes = len(step.decodes or ())  # in the first rows of the plan, and none of them computes a prompt
        for row, told in result.prompt_logprobs:
            self._requests.tell_prompt_logprobs(step.rows[row - num_decodes][0].request, told)
        token_ids, logprobs = result.token_ids, result.logprobs
        num_samples = sum([number for *_, number in step.rows], num_decodes)
        if len(token_ids) != num_samples or len(logprobs) not in (0, num_samples):
            raise ProtocolError(f"{len(token_ids)} samples of step {step.step_id}, which takes {num_samples}")
        end_sample = 0
        if step.decodes is not None:
            end_sample = len(step.decodes)
            self._accept_decodes(step.decodes, token_ids[:end_sample])
        for sequence, end, num_samples in step.rows:
            begin_sample, end_sample = end_sample, end_sample + num_samples
            row_logprobs = logprobs[begin_sample:end_sample] if logprobs else _NO_LOGPROBS
            self._accept_row(sequence, end, token_ids[begin_sample:end_sample], row_logprobs)

    def _accept_decodes(self, rows: LaunchedDecodes, token_ids: list[int]) -> None:
        """Rows of which each has one sample: those of sequences that have left first, then all others at once."""
        decodes = self._pool.decodes
        if NOT_FINITE in token_ids:
            decodes.leave_where(rows, token_ids, NOT_FINITE)
        seen: set[int] = set()
        while unseen := rows.gone.keys() - seen:  # more are gone if a request fails, all of whose choices leave
            for row in sorted(unseen):
                self._accept_row(rows.gone[row], rows.end(row), token_ids[row : row + 1], _NO_LOGPROBS)
            seen |= unseen
        columns, token_ids = decodes.take(rows, token_ids)
        self._requests.send_tokens(columns, token_ids)
        for sequence in decodes.settle_full():
            self._publish(sequence)
        for sequence in decodes.ended(columns, token_ids):
            self._requests.end_by_last_token(sequence)

    def _accept_row(
        self, sequence: Sequence, end: int, token_ids: list[int], logprobs: Sequence_[TokenLogprobs | None]
    ) -> None:
        """All is computed below position `end` now."""
        sequence.num_steps_in_flight -= 1
        if sequence.state in (SequenceState.FINISHED, SequenceState.KEPT):
            self._stats.num_wasted_rows += 1
            return
        if token_ids and token_ids[0] == NOT_READY:
            end, token_ids = sequence.undo_sample(), []
            self._stats.num_wasted_rows += 1
        sequence.num_computed_tokens = end
        self._publish(sequence)
        if token_ids:
            self._accept_samples(sequence, token_ids, logprobs)
        if sequence.state is SequenceState.LEAVING and not sequence.num_steps_in_flight:
            self._relief.give_way(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Tell of blocks that are full by now."""
        if sequence.num_computed_tokens >= (sequence.num_published_blocks + 1) * self._publication_size:
            self._pool.account.publish(sequence)
            self._places.waiting.wake(sequence.sequence_id)

    def _take_measures(self, step: LaunchedStep, result: StepResult) -> None:
        """What the step tells of rates, and of copies that sequences wait for."""
        finished = result.finished_transfers if result.step_id > self._pool.steps.barrier else []
        ready, num_copied = self._pool.swapping.on_finished(finished)
        self._preemption.cost.on_step(result, step.num_prefill_tokens, step.num_tokens, num_copied)
        self._pool.account.skips_host_prefixes = self._preemption.skips_host_prefixes
        for sequence in ready:
            self._log.runs(sequence)
            self._pool.run(sequence)

    def _accept_samples(
        self, sequence: Sequence, token_ids: list[int], logprobs: Sequence_[TokenLogprobs | None]
    ) -> None:
        sequence.num_pending_samples -= 1
        if GRAMMAR_FAILED in token_ids:
            error = InvalidGrammarError(
                "the grammar of guided_*, structured_outputs or response_format cannot be followed: it is wrong, or"
                " needs too much work"
            )
            self._requests.fail(sequence.request, error)
        elif NOT_FINITE in token_ids:
            self._requests.fail(sequence.request, NumericError("the model gave logits that are not finite"))
        elif sequence.request.beams is not None:
            self._beams.on_result(sequence, sequence.request.beams, logprobs[0] if logprobs else None)
        elif sequence.request.has_fanned_out:
            self._requests.accept_token(sequence, token_ids[0], logprobs[0] if logprobs else None)
        else:
            self._fan_out(sequence, token_ids, logprobs)

    def _fan_out(self, leader: Sequence, token_ids: list[int], logprobs: Sequence_[TokenLogprobs | None]) -> None:
        """The prompt's last row has drawn the first token of every choice: each gets a sequence of its own."""
        request, accept_token = leader.request, self._requests.accept_token
        request.has_fanned_out = True
        prompt = leader.token_ids[:]
        for choice_index in sorted(request.live.keys() - {0}):
            child = self._requests.new_sequence(request, choice_index, prompt[:])
            child.state = SequenceState.FORKING
            request.live[choice_index] = child
            if accept_token(child, token_ids[choice_index], logprobs[choice_index] if logprobs else None):
                self._forks.fork_or_queue(leader, child, request.num_prompt_tokens)
        if 0 in request.live:
            accept_token(leader, token_ids[0], logprobs[0] if logprobs else None)
        elif leader.state is not SequenceState.FINISHED:
            self._places.leave(leader, SequenceState.FINISHED)
