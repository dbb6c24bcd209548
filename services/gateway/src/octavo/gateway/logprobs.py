"""Log-probabilities as JSON can hold them."""

from __future__ import annotations

from collections.abc import Callable

from octavo.gateway.detokenization import TokenPieces

_LOWEST = -9999.0


def finite(logprob: float) -> float:
    """JSON has no minus infinity; the log-probability of an impossible token is written as -9999."""
    return max(logprob, _LOWEST)


def token_namer(pieces: TokenPieces, *, as_ids: bool) -> Callable[[int], str]:
    """How lists of log-probabilities call a token: by its text, or `token_id:ID`."""
    return "token_id:{}".format if as_ids else pieces.name
