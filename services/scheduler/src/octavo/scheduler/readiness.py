"""Owns what keeps the scheduler from being ready: links that are lost, peers that hang, a step that does not end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from octavo.common.errors import OctavoError
from octavo.scheduler.launcher import LaunchedStep
from octavo.scheduler.peer import Peer

log = structlog.get_logger()

_UNTOLD_ABSENCE_S = 2.0
"""For that long after a link is lost that may go on, gateways send requests as before, which wait."""
_STEP_PATIENCE_S, _TOKEN_PATIENCE_S = 4.0, 0.02
"""A step may last the first, and the second for each of its tokens, before the worker is said to be stuck: any worker
that is of use computes 50 tokens of a prompt in a second."""


@dataclass(slots=True)
class _Absence:
    """A link that is lost."""

    since: float
    reason: str
    """Of the last attempt; empty before the first one has failed."""
    is_told: bool
    """It cannot be resumed, or has lasted for long."""


class Readiness:
    """Judged at each event and twice a second, since silence is none."""

    def __init__(self, peers: Sequence[Peer[Any, Any]], now: float) -> None:
        """None of them has been reached yet."""
        self._peers = peers
        self._away = {peer.name: _Absence(now, "", True) for peer in peers}
        self._steps_since = now

    def came_back(self, peer: Peer[Any, Any]) -> None:
        """Its link is open."""
        self._away.pop(peer.name, None)

    def went_away(self, peer: Peer[Any, Any], error: OctavoError, now: float, *, can_resume: bool) -> None:
        """Its link is lost, or could not be opened."""
        absence = self._away.get(peer.name)
        if absence is None:
            log.warning("link lost", error=error.message)
            absence = self._away[peer.name] = _Absence(now, error.message, False)
        elif not absence.reason:
            log.info("link not open yet", error=error.message)
        absence.reason = error.message
        absence.is_told = absence.is_told or not can_resume

    def step_ended(self, now: float) -> None:
        """The next one may have been launched long before, and runs since now."""
        self._steps_since = now

    def longest_absence(self, now: float) -> tuple[float, str]:
        """Seconds, and why; 0 if all links are open."""
        return max(((now - absence.since, absence.reason) for absence in self._away.values()), default=(0.0, ""))

    def why_not(self, now: float, oldest_step: LaunchedStep | None) -> str:
        """Empty when requests are served, else the reason, for people. `oldest_step`: of those on their way."""
        for name, absence in self._away.items():
            absence.is_told = absence.is_told or now - absence.since > _UNTOLD_ABSENCE_S
            if absence.is_told:
                return absence.reason or f"not connected to the {name} yet"
        for peer in self._peers:
            if peer.is_quiet:
                return f"the {peer.name} gives no sign of life"
        if oldest_step is not None and not self._away:
            patience_s = _STEP_PATIENCE_S + _TOKEN_PATIENCE_S * oldest_step.num_tokens
            if now - max(oldest_step.launched_at, self._steps_since) > patience_s:
                return f"the worker has been at one step for over {patience_s:.0f} s"
        return ""
