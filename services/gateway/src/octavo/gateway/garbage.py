"""Cycles are searched for between requests: among them a search halts all streams, and finds next to nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import NoReturn

INTERVAL_S = 1.0
NEW_OBJECTS_WHEN_IDLE = 2_000
"""Fewer are not worth a search."""
NEW_OBJECTS_IN_A_BURST = 500
"""Made since the last look: requests come in, though none may be open yet."""
NEW_OBJECTS_WHEN_BUSY = 500_000
"""As many as two thousand open requests have; more are cycles that no pause between requests has ended."""


async def collect_between_requests(num_open_requests: Callable[[], int]) -> NoReturn:
    """Take the place of Python's own collections until cancelled. What is alive now is never searched again."""
    gc.freeze()
    gc.disable()
    try:
        num_new = 0
        while True:
            await asyncio.sleep(INTERVAL_S)
            before, num_new = num_new, gc.get_count()[0]  # counted on while collections are off
            is_idle = not num_open_requests() and num_new - before < NEW_OBJECTS_IN_A_BURST
            if num_new >= (NEW_OBJECTS_WHEN_IDLE if is_idle else NEW_OBJECTS_WHEN_BUSY):
                gc.collect()
                num_new = 0
    finally:
        gc.enable()
