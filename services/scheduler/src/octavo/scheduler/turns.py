"""Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), counted in choices.

A request takes its turn when it arrives: 1 / weight after the last turn of its tenant, but not before the turn that is
being served. Each of its choices has one, 1 / weight after the one before. So requests of one tenant go by age, tenants
that wait together are served in proportion to their weights, and a tenant that asks for the first time in a while comes
next, however much others have in line.
"""

from __future__ import annotations

_FEW_TENANTS = 64


class Turns:
    """Owns what each tenant's next turn would be at the earliest. Of those that have been idle nothing is kept."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._max_kept = _FEW_TENANTS

    def __len__(self) -> int:
        return len(self._next)

    def take(self, tenant: str, weight: int, num_choices: int, served: float) -> float:
        """The first turn of a new request, where `served` is the last one that was served."""
        turn = max(served, self._next.get(tenant, 0.0))
        self._next[tenant] = turn + num_choices / weight
        if len(self._next) > self._max_kept:
            self._next = {name: earliest for name, earliest in self._next.items() if earliest > served}
            self._max_kept = max(_FEW_TENANTS, 2 * len(self._next))
        return turn
