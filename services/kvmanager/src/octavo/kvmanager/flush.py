"""Makes prefix blocks unfindable: all, those of a tenant, or those of an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.common.block_hash import BlockKey, adapter_mark, adapter_mark_of, salt_mark, salt_mark_of
from octavo.kvmanager.block_pool import BlockPool
from octavo.kvmanager.block_table import BlockTables


@dataclass(frozen=True, slots=True)
class FlushScope:
    """Which blocks: those that match all that is given. A salt stands for all with the same first 16 bytes."""

    salt: bytes | None = None
    adapter: str | None = None

    def matcher(self) -> Callable[[BlockKey], bool]:
        """Takes a key, or the marks at the end of one."""
        salt = None if self.salt is None else salt_mark(self.salt)
        adapter = None if self.adapter is None else adapter_mark(self.adapter)

        def matches(key: BlockKey) -> bool:
            return (salt is None or salt_mark_of(key) == salt) and (adapter is None or adapter_mark_of(key) == adapter)

        return matches


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush did."""

    num_freed_blocks: int
    """Cached blocks that are free now."""
    num_used_blocks: int
    """Blocks in use, or in quarantine, that are found no more."""
    num_sequences: int
    """Live sequences that do not publish from now on."""


def flush(blocks: BlockPool, tables: BlockTables, scope: FlushScope) -> Flushed:
    """Nothing that was computed or begun before is found afterwards.

    Sequences that hold a table go on, and publish nothing more: what they compute rests on what was flushed. Those that
    hold none yet find nothing old, and publish as ever.
    """
    matches = scope.matcher()
    num_freed, num_used = blocks.flush(matches)
    return Flushed(num_freed, num_used, tables.stop_publishing(matches))
