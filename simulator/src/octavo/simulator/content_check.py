"""Holds what blocks are found by against what the worker's memory holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from octavo.common.block_hash import UNKNOWN_KEY, BlockHasher, BlockKey, digest_of
from octavo.common.codecs.arrays import pack_int32
from octavo.kvmanager.pool import Pool
from octavo.simulator.scripted_worker import ScriptedWorker


def check_contents(pool: Pool, worker: ScriptedWorker, salts: Collection[bytes]) -> None:
    """Raises AssertionError if a block that can be found holds other tokens than its key says.

    `salts` are those of all requests. A block whose predecessor is not known is not judged.
    """
    blocks, host = pool.blocks, pool.tier.host
    check = _Check(pool.hasher, salts)
    check.all("block", zip(blocks.keys, blocks.parents, strict=True), worker.content)
    check.all("host block", zip(host.keys, host.parents, strict=True), worker.host_content)


class _Check:
    def __init__(self, hasher: BlockHasher, salts: Collection[bytes]) -> None:
        self._hasher = hasher
        self._roots = [hasher.namespace(salt).root for salt in salts]

    def all(
        self,
        what: str,
        keys: Iterable[tuple[BlockKey | None, BlockKey | None]],
        content: Callable[[int], list[int]],
    ) -> None:
        """`keys` are (key, key of the block before it) of each block."""
        for block_id, (key, parent) in enumerate(keys):
            if key is not None and parent != UNKNOWN_KEY:
                is_named = self._is_named(content(block_id), digest_of(key), parent)
                assert is_named, f"{what} {block_id} holds {content(block_id)}, its key says otherwise"

    def _is_named(self, token_ids: list[int], digest: bytes, parent: BlockKey | None) -> bool:
        hasher = self._hasher
        before = self._roots if parent is None else [digest_of(parent)]
        tokens = hasher.before_tokens + pack_int32(token_ids)
        return any(hasher.digest(hasher.before_parent + one + tokens) == digest for one in before)
