"""Waits for what no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Wait until something holds. Raises TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (any condition, not only those that tell)
            await asyncio.sleep(0.005)
