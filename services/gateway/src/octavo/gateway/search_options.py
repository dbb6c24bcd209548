"""`best_of` and beam search: how many choices are generated for those that are given."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import FieldError
from octavo.gateway.limits import at_most
from octavo.gateway.openai_schema import GenerationRequest


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What a prompt's choices are chosen from."""

    num_generated: int
    """Choices that the scheduler is asked for."""
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False


def search_options(request: GenerationRequest, n: int, config: GatewayConfig) -> SearchOptions:
    """Raises FieldError."""
    best_of = request.best_of or n
    if best_of < n:
        raise FieldError("best_of", f"best_of: {best_of} is below n, which is {n}", "invalid_value")
    if request.use_beam_search:
        return _beam_options(request, n, best_of, config)
    for name, value, neutral in (
        ("length_penalty", request.length_penalty, 1.0),
        ("early_stopping", request.early_stopping, False),
    ):
        if value is not None and value != neutral:
            raise FieldError(name, f"{name}: is only allowed with use_beam_search", "invalid_value")
    at_most("best_of", best_of, config.max_n)
    if best_of > n and request.stream:
        raise FieldError("best_of", "best_of: above n, the choices cannot be streamed", "invalid_value")
    return SearchOptions(best_of)


def _beam_options(request: GenerationRequest, n: int, width: int, config: GatewayConfig) -> SearchOptions:
    at_most("n" if request.best_of is None else "best_of", width, config.max_beam_width, "beams")
    for name, is_at_odds in (
        ("stream", bool(request.stream)),
        ("temperature", bool(request.temperature)),
        ("top_p", request.top_p not in (None, 1)),
        ("top_k", request.top_k not in (None, 0, -1)),
        ("stop", bool(request.stop)),
        ("include_stop_str_in_output", bool(request.include_stop_str_in_output)),
        ("min_p", bool(request.min_p)),
        ("typical_p", request.typical_p not in (None, 1)),
        ("presence_penalty", bool(request.presence_penalty)),
        ("frequency_penalty", bool(request.frequency_penalty)),
        ("repetition_penalty", request.repetition_penalty not in (None, 1)),
        ("logit_bias", bool(request.logit_bias)),
        ("allowed_token_ids", request.allowed_token_ids is not None),
        ("bad_words", bool(request.bad_words)),
        ("min_tokens", bool(request.min_tokens)),
    ):
        if is_at_odds:
            raise FieldError(name, f"{name}: is not allowed with use_beam_search", "invalid_value")
    length_penalty = 1.0 if request.length_penalty is None else float(request.length_penalty)
    return SearchOptions(n, width, length_penalty, bool(request.early_stopping))
