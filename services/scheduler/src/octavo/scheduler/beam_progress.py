"""Beam search in the traffic: from the results of all beams of a request to their next places."""

from __future__ import annotations

from octavo.common.errors import InternalError
from octavo.common.messages.generation import TokenLogprobs
from octavo.scheduler.beams import Beams, answer_tokens
from octavo.scheduler.forks import Forks
from octavo.scheduler.places import Places
from octavo.scheduler.request_log import RequestLog
from octavo.scheduler.requests import Requests
from octavo.scheduler.sequence import Request, Sequence, SequenceState


class BeamProgress:
    """Carries out what `Beams` decides. Has no state of its own."""

    def __init__(self, places: Places, requests: Requests, forks: Forks, log: RequestLog) -> None:
        self._places = places
        self._requests = requests
        self._forks = forks
        self._log = log

    def on_result(self, beam: Sequence, beams: Beams, likeliest: TokenLogprobs | None) -> None:
        """Move the beams on, once all have their results. Blocks of dropped ones go after those of forks are shared."""
        request = beam.request
        if likeliest is None:
            self._requests.fail(request, InternalError("the worker gave no log-probabilities to a beam search"))
            return
        if not beams.take_result(beam, likeliest):
            return
        moves = beams.move(lambda token_ids: self._new_beam(request, token_ids))
        for sequence in moves.dropped:
            self._log.dropped(sequence)
            self._places.drop(sequence)
        for parent, child in moves.forked:
            self._forks.fork_or_queue(parent, child, parent.num_computed_tokens)
        for sequence in moves.continued:
            if sequence.state is SequenceState.PARKED:
                self._places.enqueue(sequence)
        if beams.group.is_over:
            self._send_answers(request, beams)

    def _new_beam(self, request: Request, token_ids: list[int]) -> Sequence:
        beam = self._requests.new_sequence(request, 0, token_ids)
        beam.is_host_fed = True
        return beam

    def _send_answers(self, request: Request, beams: Beams) -> None:
        """The search is over: its best answers are the choices."""
        for choice_index, answer in enumerate(beams.group.answers[: request.params.n]):
            if choice_index in request.live:
                tokens = answer_tokens(request, choice_index, answer)
                self._requests.accept_answer(request, choice_index, tokens)
