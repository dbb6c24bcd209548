"""What a gateway believes of a pool follows its KV manager: there, away, and back with another pool."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from octavo.gateway.pool_directory import PoolDirectory
from octavo.gateway.pool_follower import PoolFollower
from support.lively_services import LivelyPool, lively_services
from support.waiting import eventually


async def test_a_manager_that_is_away_or_comes_back_empty_is_believed_to_hold_nothing(tmp_path: Path) -> None:
    """ops-a3e: no hit is claimed for it."""
    full = LivelyPool(num_blocks=200, num_sequences=6, prompt_blocks=8, shared_blocks=4)
    empty = LivelyPool(num_blocks=200, num_sequences=0, prompt_blocks=8, shared_blocks=4)
    directory = PoolDirectory()
    follower = PoolFollower("default", lambda: f"unix:{tmp_path}/kvmanager.sock", directory)
    following = asyncio.create_task(follower.run())
    try:
        async with lively_services(tmp_path, full, tick_s=60):
            await eventually(lambda: len(directory) == len(full.pool.blocks.key_to_block) > 10)
        await eventually(lambda: directory.hasher is None)
        assert len(directory) == 0
        async with lively_services(tmp_path, empty, tick_s=60):
            await eventually(lambda: directory.hasher is not None)
            assert len(directory) == 0
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
