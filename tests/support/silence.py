"""For calls that tell their progress, where nobody listens."""

from __future__ import annotations


def silent(activity: str, fraction: float | None = None) -> None:
    """Tells nobody."""
