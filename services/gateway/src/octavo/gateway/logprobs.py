"""Log-probabilities as JSON can hold them."""

from __future__ import annotations

_LOWEST = -9999.0


def finite(logprob: float) -> float:
    """JSON has no minus infinity; the log-probability of an impossible token is written as -9999."""
    return max(logprob, _LOWEST)
